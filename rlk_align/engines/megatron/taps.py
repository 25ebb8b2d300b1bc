"""Where the canonical sites lie in megatron-core's GPTModel, and the hooks that observe them.

Activations are `[S, B, F]`. Outputs of column-parallel linears hold some features of every row,
by the layouts of `megatron_layout`; the residual stream holds every feature, of every row or,
under sequence parallelism, of some. Each rank's hooks take part; rank 0 taps.
"""

from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.base import Tap
from rlk_align.engines.common.hooks import Hooks, first
from rlk_align.engines.megatron.input import ModelInput
from rlk_align.engines.megatron.layout import (
    Layout,
    even,
    grouped_qkv,
    kv_heads,
    side_by_side,
    vocabulary,
)
from rlk_align.engines.megatron.weights import gather
from rlk_align.engines.process.ranks import Ranks
from rlk_align.model.families import ModelShape

FUSED_NORMS = ("attn_norm", "mlp_norm")
"""Operators that spec=te computes inside the linear that follows."""
Of = Callable[[Any], torch.Tensor]
"""A site's tensor, of what a module gives."""


class Tapped(Hooks):
    """Hooks on a live model while the context is entered; none where `tap` is None."""

    def __init__(
        self, model: Any, shape: ModelShape, tap: Tap | None, ranks: Ranks, sharded_rows: bool
    ) -> None:
        """`sharded_rows`: whether the residual stream is cut along the sequence (sp=1)."""
        super().__init__()
        self._model, self._shape, self._tap, self._ranks = model, shape, tap, ranks
        self._sharded_rows = sharded_rows
        self._rope: list[str] = []

    def at(self, given: ModelInput) -> None:
        """What the next forward computes."""
        self._input = given

    def __enter__(self) -> "Tapped":
        if self._tap is None:
            return self
        decoder = self._model.decoder
        self._whole(self._model.embedding, "embed")
        for i, layer in enumerate(decoder.layers):
            self._hook_layer(layer, f"layers.{i}")
        self._whole(decoder.final_layernorm, "final_norm")
        self.on_output(self._model.output_layer, lambda out: self._see_logits(out[0]))
        self._wrap_rope()
        return self

    def _hook_layer(self, layer: Any, name: str) -> None:
        shape, tp = self._shape, self._ranks.world
        attention, mlp = layer.self_attention, layer.mlp
        width = shape.heads * shape.head_dim

        def enter_attention(*_: Any) -> None:
            self._rope = [f"{name}.q_rope", f"{name}.k_rope"]

        self.before(attention, enter_attention)
        if not hasattr(attention.linear_qkv, "layer_norm_weight"):
            self._whole(layer.input_layernorm, f"{name}.attn_norm")
            self._whole(layer.pre_mlp_layernorm, f"{name}.mlp_norm")
        qkv = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self._split(attention.linear_qkv, grouped_qkv(shape, tp, qkv))
        if shape.family.qk_norm:
            self._split(attention.q_layernorm, even(f"{name}.q_norm", width, tp))
            self._split(attention.k_layernorm, kv_heads(f"{name}.k_norm", shape, tp))
        self._split_input(attention.linear_proj, even(f"{name}.attn", width, tp))
        self._whole(attention.linear_proj, f"{name}.o_proj", with_bias)
        self._whole_input(layer.pre_mlp_layernorm, f"{name}.attn_residual")
        gate_up = (f"{name}.gate_proj", f"{name}.up_proj")
        self._split(mlp.linear_fc1, side_by_side(gate_up, shape.intermediate, tp), with_bias)
        self._split_input(mlp.linear_fc2, even(f"{name}.act", shape.intermediate, tp))
        self._whole(mlp.linear_fc2, f"{name}.down_proj", with_bias)
        self._whole(layer, f"{name}.mlp_residual")

    def _whole(self, module: Any, site: str, of: Of = first) -> None:
        self.on_output(module, lambda out: self._see_whole(site, of(out)))

    def _whole_input(self, module: Any, site: str) -> None:
        self.on_input(module, lambda value: self._see_whole(site, value))

    def _split(self, module: Any, layout: Layout, of: Of = first) -> None:
        self.on_output(module, lambda out: self._see_split(layout, of(out)))

    def _split_input(self, module: Any, layout: Layout) -> None:
        self.on_input(module, lambda value: self._see_split(layout, value))

    def _wrap_rope(self) -> None:
        """Rotary embedding is a function of megatron-core's attention module: it is wrapped for as
        long as the taps are in. Attention calls it for the query, then for the key."""
        from megatron.core.transformer import attention

        original = attention.apply_rotary_pos_emb
        shape, tp = self._shape, self._ranks.world

        def observed(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            site = self._rope.pop(0)
            if site.endswith("q_rope"):
                self._see_split(even(site, shape.heads * shape.head_dim, tp), out)
            else:
                self._see_split(kv_heads(site, shape, tp), out)
            return out

        self.replace(attention, "apply_rotary_pos_emb", observed)

    def _see_whole(self, site: str, value: torch.Tensor) -> None:
        if self._sharded_rows:
            parts = gather(value, self._ranks)
            value = value if parts is None else torch.cat(parts)
        if self._ranks.rank == 0:
            assert self._tap is not None
            rows = value.flatten(0, 1)[self._input.index]
            self._tap(site, rows, self._input.rows.sample, self._input.rows.position)

    def _see_split(self, layout: Layout, value: torch.Tensor) -> None:
        # [S, B, F], [S, B, heads, D] or, packed, [T, heads, D] -> [N, F] of this rank.
        tokens = self._input.ids.numel()
        parts = gather(value.reshape(tokens, -1)[self._input.index], self._ranks)
        if parts is not None:
            assert self._tap is not None
            for op in layout.ops:
                rows = layout.assemble(op, parts, dim=1)
                self._tap(op, rows, self._input.rows.sample, self._input.rows.position)

    def _see_logits(self, logits: torch.Tensor) -> None:
        given = self._input
        parts = gather(logits.flatten(0, 1)[given.sampled], self._ranks)
        if parts is not None:
            assert self._tap is not None
            layout = vocabulary("logits", self._shape, self._ranks.world)
            kept = given.rows.sampled
            rows = layout.assemble("logits", parts, dim=1)
            self._tap("logits", rows, given.rows.sample[kept], given.rows.position[kept])


def with_bias(output: Any) -> torch.Tensor:
    """What a linear computes, with the bias that megatron-core leaves to whatever follows."""
    bias = output[1] if isinstance(output, tuple) else None
    return first(output) if bias is None else first(output) + bias
