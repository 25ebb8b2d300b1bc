"""vLLM's requests: those of an `LLM`, and those of a server."""
