"""The verbs of `tokenfleet fleet` that change a running fleet."""
