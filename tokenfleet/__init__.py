"""The faces of Tokenfleet: command line, plans, profiles, traces, reports and services."""

__version__ = "0.1.0"
