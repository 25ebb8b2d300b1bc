"""A family that vLLM has no class for: vLLM runs the code of transformers, and puts its own layers
into it, most of which the kernels replace as in vLLM's own models."""

import weakref
from typing import Any

from vllm.model_executor.models import transformers
from vllm.model_executor.models.transformers.fusers.rms_norm import TPAwareRMSNorm

from rlk_kernels.integrations import transformers_rotary
from rlk_kernels.integrations.operators import NORMS
from rlk_kernels.integrations.vllm import config
from rlk_kernels.integrations.vllm.layers import RlkRMSNorm


class RlkTPAwareRMSNorm(RlkRMSNorm, TPAwareRMSNorm):
    pass


class TransformersForCausalLM(transformers.TransformersForCausalLM):
    """vLLM's class, by whose name vLLM knows that it runs the code of transformers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not config.is_excluded(*NORMS):
            for module in self.model.modules():
                if type(module) is TPAwareRMSNorm:
                    module.__class__ = RlkTPAwareRMSNorm
        if not config.is_excluded("q_rope", "k_rope"):
            undo = transformers_rotary.install(self.model.rotary_emb, self.text_config)
            weakref.finalize(self, undo.close)
