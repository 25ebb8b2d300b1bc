"""GLM-4.5 and GLM-4.7-Flash for a vLLM whose routers are torch's own linears, such as 0.26. vLLM
has no registry for that layer, but it has one for the model."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.glm4_moe import Glm4MoE, Glm4MoeForCausalLM
from vllm.model_executor.models.glm4_moe_lite import Glm4MoeLiteForCausalLM


class _Routers:
    """Replaces these routers by vLLM's linear, which the kernels replace in turn."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, block in list(self.named_modules()):
            if isinstance(block, Glm4MoE) and type(block.gate) is nn.Linear:
                block.gate = _router(block.gate, f"{name}.gate")


class RlkGlm4MoeForCausalLM(_Routers, Glm4MoeForCausalLM):
    pass


class RlkGlm4MoeLiteForCausalLM(_Routers, Glm4MoeLiteForCausalLM):
    pass


def _router(plain: nn.Linear, name: str) -> ReplicatedLinear:
    """A router that returns a tensor, as the block expects from torch's linear. Its weight has the
    model's dtype, like the checkpoint's."""
    router = ReplicatedLinear(
        plain.in_features, plain.out_features, bias=False, prefix=name, return_bias=False
    )
    # The layer's experts share this parameter.
    router.e_score_correction_bias = plain.e_score_correction_bias
    return router
