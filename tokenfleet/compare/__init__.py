"""The comparison of a running fleet with its simulation: the replay and the overhead of HTTP."""
