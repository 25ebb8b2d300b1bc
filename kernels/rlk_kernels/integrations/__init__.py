"""The kernels inside real engines: `vllm`, `megatron`, `hf`. Each imports its own engine, and only
when it is used; `profile` holds the operators that all of them call."""
