"""The worker process: a Ray actor around one vLLM engine, and the link that gateways reach it by."""
