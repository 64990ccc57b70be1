"""What a gateway and a worker both know: vLLM's private surface, the engine link and its wire format."""
