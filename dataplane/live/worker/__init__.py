"""The worker process: a Ray actor around one vLLM engine, and the link through which gateways reach it."""
