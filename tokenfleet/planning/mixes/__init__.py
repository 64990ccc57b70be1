"""Mixes of worker types: what a mix can carry at most, and the search for the cheapest."""
