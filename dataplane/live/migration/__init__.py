"""Live migration of one request: the coordinator and the move it walks through the protocol."""
