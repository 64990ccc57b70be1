"""Request history on disk, readable without a fleet."""
