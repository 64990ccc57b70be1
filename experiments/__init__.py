"""Experiments: one script for each claimed figure, in a folder for each part of the system."""
