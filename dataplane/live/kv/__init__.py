"""KV blocks between workers: vLLM's connector hooks, pinned blocks, and the transports that copy them."""
