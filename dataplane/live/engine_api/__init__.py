"""The interface shared by gateway and worker: vLLM's private surface, the engine link, its wire format."""
