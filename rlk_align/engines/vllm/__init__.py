"""vLLM: the engine in the worker, and what runs inside its own workers."""
