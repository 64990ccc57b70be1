"""What autoscaling achieves on production rates, and beside published systems."""
