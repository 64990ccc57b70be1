"""`tokenfleet serve`: its flags, the fleets they ask for, and the processes that run them."""
