"""Qwen3.5's text model in vLLM, in a module of its own, because vLLM's imports torchvision."""

from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

from rlk_kernels.integrations.vllm.delta_net import Hybrid


class RlkQwen3_5ForCausalLM(Hybrid, Qwen3_5ForCausalLM):
    pass
