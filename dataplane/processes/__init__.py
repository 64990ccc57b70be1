"""Processes of ours: how they are started, kept running and ended. Needs no fleet."""
