"""Decisions: numbers in, decisions out. No clock, no I/O, no globals."""
