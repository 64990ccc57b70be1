"""Emulated engines: the protocol and timing of an engine without a model.

They serve for trying operations without vLLM's engine and for testing the layers above it. Requests, aborts,
outputs, KV holds, loads and their failures behave as a worker's do; steps last as long as a profile says. The
text means nothing.
"""
