"""The kernels inside engines: `vllm`, `sglang`, `megatron` and `hf`, each of which imports its own
engine when it is used. `profile` has the operators that all of them call."""
