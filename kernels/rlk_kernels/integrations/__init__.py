"""The kernels inside real engines: `vllm`, `megatron`, `hf`. Each imports its own engine, and only
where it is asked to do something; `profile` holds the operators that all of them call."""
