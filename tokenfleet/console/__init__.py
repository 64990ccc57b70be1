"""The console: two pages, one to plan and one to watch a fleet, served by the control API (pages.py)."""
