"""Where the canonical sites lie in an HF decoder, and the hooks on them."""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.common.tap import Tap
from rlk_align.model.operators import layer_modules

INPUT_SITES = {
    "attn": "self_attn.o_proj",
    "attn_residual": "post_attention_layernorm",
    "act": "mlp.down_proj",
}
"""Operators without a module of their own -> the module whose input is that site."""


def hf_places(model: Any) -> Iterator[Place]:
    """Where each site lies in a live model."""
    yield Place(sites=("embed",), module="model.embed_tokens")
    for i, layer in enumerate(model.model.layers):
        here, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        modules = dict(layer.named_modules())
        for op, path in layer_modules().items():
            if path in modules:
                yield Place(sites=(f"layers.{i}.{op}",), module=f"{here}.{path}")
        for op in ("q_rope", "k_rope"):
            yield Place(sites=(f"layers.{i}.{op}",), module=attention, end="rope")
        for op, path in INPUT_SITES.items():
            yield Place(sites=(f"layers.{i}.{op}",), module=f"{here}.{path}", end="input")
        yield Place(sites=(f"layers.{i}.mlp_residual",), module=here)
    yield Place(sites=("final_norm",), module="model.norm")
    yield Place(sites=("logits",), module="lm_head", rows="sampled")


class Tapped(SiteHooks):
    """Hooks on a live HF model."""

    def __init__(self, model: Any, tap: Tap | None, editor: Editor | None = None) -> None:
        super().__init__(model, hf_places(model), tap, editor)

    def at(self, rows: ForwardRows, device: torch.device) -> None:
        """What the next forward computes."""
        self._rows, self._device = rows, device
        self._all = LiveRows.of(rows, rows.index, device)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows:
        if place.rows == "all":
            return self._all
        r = self._rows
        # A decode step asks for the last rows' logits only.
        cells = value.shape[:-1].numel()
        index = torch.from_numpy(r.index[r.sampled] - (r.cells - cells)).to(self._device)
        return LiveRows(index, r.sample[r.sampled], r.position[r.sampled], cells)

    def install(self) -> None:
        super().install()
        # FSDP gives the model and its layers classes of its own; the attention keeps its own.
        attention = self._model.model.layers[0].self_attn
        self._wrap_rope(sys.modules[type(attention).__module__])

    def _wrap_rope(self, modeling: Any) -> None:
        """Rotary embedding is a function of the modeling module, not a torch module: it is
        wrapped for as long as the taps are in."""
        original = modeling.apply_rotary_pos_emb

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            query, key = original(*args, **kwargs)
            # [B, heads, S, head_dim] -> [B, S, heads, head_dim]
            self.rope(query.transpose(1, 2))
            self.rope(key.transpose(1, 2))
            return query, key

        self.replace(modeling, "apply_rotary_pos_emb", observed)
