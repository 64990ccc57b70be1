"""Emulated engines: an engine's protocol and timing without a model. Its text means nothing.

To try operations without vLLM's engine, and to test what stands above it: requests, aborts, outputs, KV
holds, loads and their failures behave as a worker's do, steps last what a profile says they last.
"""
