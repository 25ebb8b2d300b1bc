"""MiniMax-M2. Its attention in vLLM norms q and k by a static method of vLLM's class, which a class
that replaces it does not reach."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.minimax_m2 import (
    MiniMaxM2Attention,
    MiniMaxM2ForCausalLM,
    MiniMaxM2MoE,
    MiniMaxText01RMSNormTP,
)

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.vllm import config


class RlkMiniMaxText01RMSNormTP(Counted, MiniMaxText01RMSNormTP):
    """A norm over all heads, on one rank."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self.count()
        assert residual is None
        return profile.norm(x, self.weight, self.variance_epsilon)


class RlkMiniMaxM2Attention(MiniMaxM2Attention):
    """Calls the norms of q and k as modules, whether the kernels compute them or vLLM."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        return self.o_proj(self.attn(q, k, v))[0]


class RlkMiniMaxM2ForCausalLM(MiniMaxM2ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, MiniMaxM2Attention):
                module.__class__ = RlkMiniMaxM2Attention
                for name in ("q_norm", "k_norm"):
                    if not config.is_excluded(name):
                        getattr(module, name).__class__ = RlkMiniMaxText01RMSNormTP
            elif isinstance(module, MiniMaxM2MoE):
                loader = _Rounded(vllm_config.model_config.dtype)
                module.e_score_correction_bias.weight_loader = loader.load


class _Rounded:
    """Loads the corrections of scores, which vLLM keeps in fp32, with the values that transformers
    gives them: those of the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def load(self, param: Tensor, loaded_weight: Tensor) -> None:
        param.data.copy_(loaded_weight.to(self._dtype))
