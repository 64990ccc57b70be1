"""`tokenfleet advise`: its command, its flags, its output and its plan."""
