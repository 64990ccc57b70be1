"""An endpoint picker: placement for a gateway such as Envoy, over vLLM servers that run elsewhere."""
