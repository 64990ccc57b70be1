"""A running fleet beside its simulation: the replay and the overhead of HTTP."""
