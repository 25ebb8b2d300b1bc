"""GLM-4.5 for a vLLM that makes its routers of torch's own linear, as 0.26 does: no class can be
registered for that layer, but one can for the model."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.glm4_moe import Glm4MoE, Glm4MoeForCausalLM


class RlkGlm4MoeForCausalLM(Glm4MoeForCausalLM):
    """Makes these routers of vLLM's linear, in whose place the kernels put their own."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, block in list(self.named_modules()):
            if isinstance(block, Glm4MoE) and type(block.gate) is nn.Linear:
                block.gate = _router(block.gate, f"{name}.gate")


def _router(plain: nn.Linear, name: str) -> ReplicatedLinear:
    """A router that returns a tensor, as the block expects of a plain one; its weight has the
    model's dtype, as the checkpoint's has."""
    router = ReplicatedLinear(
        plain.in_features, plain.out_features, bias=False, prefix=name, return_bias=False
    )
    # Shared with the layer's experts.
    router.e_score_correction_bias = plain.e_score_correction_bias
    return router
