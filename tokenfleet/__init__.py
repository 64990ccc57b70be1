"""The faces of Tokenfleet: command line, files, reports, services."""

__version__ = "0.1.0"
