"""The GPU day: what to measure where a GPU is at hand. `day.py` runs it."""
