"""The planner: its request and inputs, the search for a fleet, its certainty, and its reasons."""
