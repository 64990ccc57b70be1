"""The data plane as a model: engines on a virtual clock."""
