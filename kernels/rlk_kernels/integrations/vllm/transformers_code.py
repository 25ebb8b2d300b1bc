"""A family of which vLLM runs the code of transformers: it puts its own layers into that, most of
which the kernels replace as in vLLM's own models. The others they replace as in HF."""

import weakref
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from vllm.model_executor.models import transformers
from vllm.model_executor.models.transformers.fusers.rms_norm import TPAwareRMSNorm

from rlk_kernels.integrations import transformers_rotary
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import LAYER_NORMS
from rlk_kernels.integrations.operators import NORMS, become
from rlk_kernels.integrations.transformers_modules import HFLayerNorm, mlp_class
from rlk_kernels.integrations.vllm import config, gather
from rlk_kernels.integrations.vllm.layers import RlkRMSNorm


class RlkTPAwareRMSNorm(RlkRMSNorm, TPAwareRMSNorm):
    """Norms all heads of q or of k, of which each of several ranks has some."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        features, size = x.shape[-1], self.weight.shape[0]
        if features == size:
            return super().forward(x, residual)
        if features * self.tp_size != size:
            raise NotSupported(
                f"a norm over {size} features of which each of {self.tp_size} ranks has {features} "
                "is not supported"
            )
        normed = super().forward(gather.columns(x, self.tp_size))
        return normed.chunk(self.tp_size, -1)[self.tp_rank]


class TransformersForCausalLM(transformers.TransformersForCausalLM):
    """vLLM's class, by whose name vLLM knows that it runs the code of transformers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not config.is_excluded(*NORMS):
            for module in self.model.modules():
                if type(module) is TPAwareRMSNorm:
                    module.__class__ = RlkTPAwareRMSNorm
                elif self.text_config.model_type in LAYER_NORMS and _is_layer_norm(module):
                    become(module, HFLayerNorm, ExitStack())
        if not config.is_excluded("act"):
            for layer in self.model.layers:
                # Where vLLM fuses gate and up itself, it binds another forward.
                if "forward" not in vars(layer.mlp):
                    become(layer.mlp, mlp_class(layer.mlp), ExitStack())
        if not config.is_excluded("q_rope", "k_rope"):
            undo = transformers_rotary.install(self.model.rotary_emb, self.text_config)
            weakref.finalize(self, undo.close)


def _is_layer_norm(module: Any) -> bool:
    """Whether a module is a LayerNorm of vLLM, or one of transformers that vLLM leaves there."""
    return type(module).__name__.endswith("LayerNorm")
