"""Placement decisions: which worker runs which request."""
