"""Several models behind one endpoint: each has a fleet of its own, and all share GPUs and dollars."""
