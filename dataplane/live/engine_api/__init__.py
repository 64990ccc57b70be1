"""The interface shared by gateway and worker: vLLM's private surface, the engine link, its wire format."""

VLLM_VERSION = "0.32.0"  # whose private surface it is
RAY_VERSION = "2.60.0"
