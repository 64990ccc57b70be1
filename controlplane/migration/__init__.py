"""Migration decisions: which requests should move, and the steps of one move."""
