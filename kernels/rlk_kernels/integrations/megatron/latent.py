"""Latent attention of the layer spec (MLA), absorbed: queries are multiplied by the weight of keys,
and outputs over latents by that of values, the order in which rollout engines decode.

S = length, B = sequences, activations `[S, B, F]`, packed `[T, F]`; H = heads of this rank,
L = features of a latent, R = rotated features
"""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.megatron.attention import FIRST_ROWS, CoreAttention, boundaries
from rlk_kernels.integrations.megatron.layers import Column, Positions, Rope, check_begin
from rlk_kernels.parallel.context import own_positions

DOWN = ("linear_q_down_proj", "linear_kv_down_proj")
"""The products whose classes megatron-core's constructor compares with its own."""


class LatentCore(CoreAttention):
    """Attention over latents, which are keys and values of all heads."""

    def __init__(
        self, config: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        """`k_channels`, `v_channels`: the widths of what megatron-core would expand."""
        super().__init__(config, *args, windows=(None,) * config.num_layers, **kwargs)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        attn_mask_type: Any = None, attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """`query`: `[S, B, H, L + R]`; `key`: latents and rotated keys, `[S, B, L + R]`; `value`:
        the weight that would expand them."""
        heads, width = query.shape[-2], self.config.qk_head_dim
        weight = profile.absorbed(value, heads, width)
        core = partial(self._attend_latents, weight=weight)
        kind = attn_mask_type, attention_bias
        return self.by_sequence(core, (query, key), attention_mask, *kind, packed_seq_params)

    def _attend_latents(
        self, q: Tensor, latents: Tensor, cu_q: Tensor, cu_k: Tensor, weight: profile.Absorbed
    ) -> Tensor:
        return profile.latent_attention(
            q, latents, weight, cu_q, cu_k, self.softmax_scale, self.tp_group
        )


class LatentAttention(MLASelfAttention):
    """megatron-core's latent attention, which keeps its latents. Rotates by `Rope`."""

    rotary_pos_emb: Positions
    """Set by `use_kernels`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rope = Rope(interleaved=True)
        # Nothing is expanded that could be computed again.
        self.recompute_up_proj = False

    def absorb(self, excluded: frozenset[str]) -> None:
        """Replaces the products of latents, which the constructor takes of megatron-core's own
        class alone."""
        for name, op in zip(DOWN, ("q_a", "kv_a"), strict=True):
            linear = getattr(self, name, None)
            if linear is not None and op not in excluded:
                if type(linear) is not ColumnParallelLinear:
                    kind = type(linear).__name__
                    raise NotSupported(f"{name} is a {kind}; use the local spec")
                linear.__class__ = Column

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("inference_context") is not None:
            raise NotSupported("megatron-core's inference is not supported, only training is")
        out = super().forward(hidden_states, attention_mask, *args, **kwargs)
        if self.layer_number == 1:
            check_begin(self._positions, getattr(attention_mask, FIRST_ROWS, (None,))[0])
        return out

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, position_ids: Any = None,
        packed_seq_params: Any = None, inference_context: Any = None, **_unused: Any,
    ) -> Any:  # fmt: skip
        """(queries over latents, latents and rotated keys, the weight that would expand them, and
        both latents)."""
        config = self.config
        if config.q_lora_rank is None:
            of_queries = hidden_states
            q, _ = self.linear_q_proj(of_queries)
        else:
            of_queries = self._gathered(self.linear_q_down_proj(hidden_states)[0])
            q, _ = self.linear_q_up_proj(self.q_layernorm(of_queries))
        both = self._gathered(self.linear_kv_down_proj(hidden_states)[0])
        latent, key = both.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        latent = self.kv_layernorm(latent)
        q = q.unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))
        q, rotated = q.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        positions = self._rotated_by(packed_seq_params, len(hidden_states), hidden_states)
        rotary = self.rotary_pos_emb
        rotated, key = self.rope(
            rotated, key[..., None, :], positions, rotary.inv_freq, rotary.rlk_scaling
        )
        weight = self.linear_kv_up_proj.weight
        absorbed = profile.absorbed(weight, q.shape[-2], config.qk_head_dim)
        rows = (x.flatten(0, 1) for x in (q, rotated))
        query = profile.latent_queries(*rows, absorbed).unflatten(0, q.shape[:2])
        latents = torch.cat([latent, key[..., 0, :]], -1)
        if packed_seq_params is not None:
            query, latents = query[:, 0], latents[:, 0]
        return query, latents, weight, of_queries, latent

    def _gathered(self, x: Tensor) -> Tensor:
        """All features of a product whose features ranks share."""
        return gather_from_tensor_model_parallel_region(x, group=self.tp_group)

    def _rotated_by(self, packed: Any, length: int, hidden: Tensor) -> Tensor:
        """The positions of rows, int64 `[S, B or 1]`."""
        rotary = self.rotary_pos_emb
        if not isinstance(rotary, Positions):
            raise NotSupported(
                "the layer's rotary embedding has no kernel: call use_kernels(model)"
            )
        out = rotary(length, packed_seq=packed is not None)
        positions = out[0] if isinstance(out, tuple) else out
        if packed is not None and not len(positions):
            positions = own_positions(boundaries(packed), length, None)[:, None]
        self._positions = positions.to(hidden.device)
        return self._positions
