"""vLLM: the requests of an `LLM` and those of a server."""
