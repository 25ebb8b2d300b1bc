"""Qwen3.5's text models in vLLM, in a module of its own, because vLLM's imports torchvision."""

from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

from rlk_kernels.integrations.vllm.delta_net import Hybrid


# In vLLM 0.26 only the class for images is an IsHybrid.
class RlkQwen3_5ForCausalLM(Hybrid, Qwen3_5ForCausalLM, IsHybrid):
    pass


class RlkQwen3_5MoeForCausalLM(Hybrid, Qwen3_5MoeForCausalLM, IsHybrid):
    pass
