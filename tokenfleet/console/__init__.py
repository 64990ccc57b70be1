"""The console: one page for planning and one for watching a fleet, served by the control API."""
