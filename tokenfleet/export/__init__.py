"""A plan as what others run: Kubernetes objects, Helm values, rules, a dashboard, a systemd unit."""
