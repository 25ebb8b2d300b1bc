"""Where the canonical sites lie in an HF decoder, and the hooks that observe them."""

import sys
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Tap
from rlk_align.engines.common.hooks import Hooks, first
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.model.checkpoint import LAYER_MODULES
from rlk_align.model.families import ModelShape

INPUT_SITES = {
    "attn": "self_attn.o_proj",
    "attn_residual": "post_attention_layernorm",
    "act": "mlp.down_proj",
}
"""Operators without a module of their own -> the module whose input is that site."""


class Tapped(Hooks):
    """Hooks on a live model while the context is entered; none where `tap` is None."""

    def __init__(self, model: Any, shape: ModelShape, tap: Tap | None) -> None:
        super().__init__()
        self._model, self._shape, self._tap = model, shape, tap
        self._layer = 0

    def at(self, rows: ForwardRows) -> None:
        """What the next forward computes."""
        self._rows = rows

    def __enter__(self) -> "Tapped":
        if self._tap is None:
            return self
        inner = self._model.model
        self._output(inner.embed_tokens, "embed")
        for i, layer in enumerate(inner.layers):
            self._hook_layer(i, layer)
        self._output(inner.norm, "final_norm")
        self.on_output(self._model.lm_head, self._see_logits)
        # FSDP gives the model and its layers classes of its own; the attention keeps its own.
        self._wrap_rope(sys.modules[type(inner.layers[0].self_attn).__module__])
        return self

    def _hook_layer(self, i: int, layer: Any) -> None:
        def enter_attention(*_: Any) -> None:
            self._layer = i

        self.before(layer.self_attn, enter_attention)
        modules = dict(layer.named_modules())
        for op, path in LAYER_MODULES.items():
            if path in modules:
                self._output(modules[path], f"layers.{i}.{op}")
        for op, path in INPUT_SITES.items():
            self._input(modules[path], f"layers.{i}.{op}")
        self._output(layer, f"layers.{i}.mlp_residual")

    def _output(self, module: Any, site: str) -> None:
        self.on_output(module, lambda out: self._see(site, first(out)))

    def _input(self, module: Any, site: str) -> None:
        self.on_input(module, lambda value: self._see(site, value))

    def _wrap_rope(self, modeling: Any) -> None:
        """Rotary embedding is a function of the modeling module, not a torch module: it is
        wrapped for as long as the taps are in."""
        original = modeling.apply_rotary_pos_emb

        def observed(*args: Any, **kwargs: Any) -> Any:
            query, key = original(*args, **kwargs)
            # [1, heads, T, head_dim] -> [T, heads * head_dim]
            self._see(f"layers.{self._layer}.q_rope", query.transpose(1, 2))
            self._see(f"layers.{self._layer}.k_rope", key.transpose(1, 2))
            return query, key

        self.replace(modeling, "apply_rotary_pos_emb", observed)

    def _see(self, site: str, value: torch.Tensor) -> None:
        self._give(site, value.reshape(self._rows.cells, -1), np.arange(len(self._rows.index)))

    def _see_logits(self, logits: torch.Tensor) -> None:
        rows = logits.reshape(-1, logits.shape[-1])
        # A decode step asks for the last rows' logits only.
        self._give("logits", rows, np.flatnonzero(self._rows.sampled))

    def _give(self, site: str, value: torch.Tensor, chosen: np.ndarray) -> None:
        """`value`: the last rows of the output, or all of them; `chosen`: of the trace's rows."""
        assert self._tap is not None
        r = self._rows
        index = r.index[chosen] - (r.cells - len(value))
        if len(index) < len(value):
            value = value[torch.from_numpy(index).to(value.device)]
        self._tap(site, value, r.sample[chosen], r.position[chosen])
