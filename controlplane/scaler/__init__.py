"""Scaling decisions: how many workers of each kind, and when to change their number."""
