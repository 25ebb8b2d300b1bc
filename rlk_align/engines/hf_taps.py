"""Where the canonical sites lie in an HF decoder, and the hooks that observe them."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Tap
from rlk_align.engines.hooks import Hooks, first
from rlk_align.families import ModelShape

LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""Operator -> the module of a decoder layer whose output is that site."""

INPUT_SITES = {
    "attn": "self_attn.o_proj",
    "attn_residual": "post_attention_layernorm",
    "act": "mlp.down_proj",
}
"""Operators without a module of their own -> the module whose input is that site."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward, flattened: arrays `[sequences * length]`."""

    sample: np.ndarray
    position: np.ndarray
    real: np.ndarray
    """False where it is padding."""
    sampled: np.ndarray
    """Whether the next token was sampled there."""

    @classmethod
    def of(cls, sample: int, positions: range, sampled: range) -> "Rows":
        """One sequence's rows, without padding."""
        position = np.arange(positions.start, positions.stop)
        return cls(
            np.full(len(position), sample),
            position,
            np.ones(len(position), dtype=bool),
            (position >= sampled.start) & (position < sampled.stop),
        )


class Tapped(Hooks):
    """Hooks on a live model while the context is entered; none where `tap` is None."""

    def __init__(self, model: Any, shape: ModelShape, tap: Tap | None) -> None:
        super().__init__()
        self._model, self._shape, self._tap = model, shape, tap
        self._layer = 0

    def at(self, rows: Rows) -> None:
        """What the next forward computes, `[sequences * length]` rows in all."""
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
        assert self._tap is not None
        r = self._rows
        rows = value.reshape(len(r.real), -1)
        if not r.real.all():
            rows = rows[_index(r.real, rows)]
        self._tap(site, rows, r.sample[r.real], r.position[r.real])

    def _see_logits(self, logits: torch.Tensor) -> None:
        assert self._tap is not None
        r = self._rows
        rows = logits.reshape(-1, logits.shape[-1])
        # A decode step asks for the last rows' logits only.
        last = slice(len(r.real) - len(rows), None)
        wanted = r.sampled[last]
        kept = rows[_index(wanted, rows)]
        self._tap("logits", kept, r.sample[last][wanted], r.position[last][wanted])


def _index(mask: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(rows.device)
