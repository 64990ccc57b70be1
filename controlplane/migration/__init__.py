"""What should move, and the steps of one move."""
