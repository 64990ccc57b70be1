"""Advice for a fleet that runs elsewhere: how many replicas it should have, by the metrics of its servers."""
