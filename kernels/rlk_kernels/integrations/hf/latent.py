"""Latent attention of transformers' models (MLA), absorbed in every pass.

B = sequences of the batch, T = their rows, S = keys, H = heads, L = features of a latent,
R = rotated features
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.hf.attention import AttentionModule, attend_rows
from rlk_kernels.integrations.transformers_modules import cast
from rlk_kernels.integrations.transformers_rotary import rotating


class LatentAttention(AttentionModule):
    """Queries are multiplied by the weight of keys, and outputs over latents by that of values: the
    order in which rollout engines decode."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        self.rlk_check(past_key_values)
        if self.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q, rotated = queries.unflatten(-1, (self.num_heads, self.qk_head_dim)).split(
            [self.qk_nope_head_dim, self.qk_rope_head_dim], -1
        )
        latent, key = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], -1
        )
        latent = self.kv_a_layernorm(latent)[:, None]
        rotate = getattr(sys.modules[type(self).__module__], rotating(self.config))
        rotated, key = rotate(rotated.transpose(1, 2), key[:, None], *position_embeddings)
        if past_key_values is not None:
            latent, key = past_key_values.update(latent, key, self.layer_idx)
        latents = torch.cat([latent, key], -1).squeeze(1)
        weight = profile.absorbed(
            cast(self.kv_b_proj.weight), self.num_heads, self.qk_nope_head_dim
        )
        rows = q.flatten(0, 1), rotated.transpose(1, 2).flatten(0, 1)
        q = profile.latent_queries(*rows, weight).unflatten(0, hidden_states.shape[:2])
        core = partial(_core, weight=weight, scale=self.scaling)
        out = attend_rows(
            self, q, (latents,), attention_mask, core, rlk_cached=past_key_values is not None,
            dropout=self.attention_dropout if self.training else 0.0, **kwargs,
        )  # fmt: skip
        return self.o_proj(out.flatten(-2)), None


def _core(
    q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, weight: profile.Absorbed, scale: float
) -> Tensor:
    return profile.latent_attention(q, latents, weight, cu_q, cu_k, scale)
