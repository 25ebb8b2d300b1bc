"""Where the canonical sites lie in megatron-core's GPTModel, and the hooks on them.

Activations are `[S, B, F]`. Outputs of column-parallel linears hold some features of every row;
the residual stream holds every feature, of every row or, under sequence parallelism, of some. Each
rank's hooks take part; rank 0 taps.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.layout import of_outputs
from rlk_align.engines.common.places import FIRST, WITH_BIAS, Access, End, Place
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.common.tap import Tap
from rlk_align.engines.megatron.input import ModelInput
from rlk_align.engines.megatron.layout import grouped_qkv, vocabulary
from rlk_align.engines.megatron.weights import gather
from rlk_align.engines.process.ranks import Ranks
from rlk_align.model.families import ModelShape

FUSED_NORMS = ("attn_norm", "mlp_norm")
"""Operators that spec=te computes inside the linear that follows."""


def megatron_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """Where each site lies in a live model of `tp` ranks."""
    table = "embedding.word_embeddings"
    yield Place(sites=("embed",), module="embedding", parameters_in=table)
    for i, layer in enumerate(model.decoder.layers):
        yield from _layer_places(layer, i, shape, tp)
    yield Place(sites=("final_norm",), module="decoder.final_layernorm")
    logits = vocabulary("logits", shape, tp)
    yield Place(
        sites=("logits",),
        module="output_layer",
        layout=logits,
        rows="sampled",
        parameters_in=table if model.share_embeddings_and_output_weights else "",
    )


def _layer_places(layer: Any, i: int, shape: ModelShape, tp: int) -> Iterator[Place]:
    name, here = f"layers.{i}", f"decoder.layers.{i}"
    attention, mlp = f"{here}.self_attention", f"{here}.mlp"

    def place(module: str, *ops: str, end: End = "output", access: Access = FIRST) -> Place:
        sites = tuple(f"{name}.{op}" for op in ops)
        layout = of_outputs(sites, shape, tp)
        return Place(sites=sites, module=module, end=end, access=access, layout=layout)

    if not hasattr(layer.self_attention.linear_qkv, "layer_norm_weight"):
        yield place(f"{here}.input_layernorm", "attn_norm")
        yield place(f"{here}.pre_mlp_layernorm", "mlp_norm")
    qkv = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    grouped = grouped_qkv(shape, tp, qkv)
    yield Place(sites=qkv, module=f"{attention}.linear_qkv", layout=grouped)
    if shape.has("q_norm"):
        yield place(f"{attention}.q_layernorm", "q_norm")
        yield place(f"{attention}.k_layernorm", "k_norm")
    yield place(attention, "q_rope", end="rope")
    yield place(attention, "k_rope", end="rope")
    yield place(f"{attention}.linear_proj", "attn", end="input")
    yield place(f"{attention}.linear_proj", "o_proj", access=WITH_BIAS)
    yield place(f"{here}.pre_mlp_layernorm", "attn_residual", end="input")
    yield place(f"{mlp}.linear_fc1", "gate_proj", "up_proj", access=WITH_BIAS)
    yield place(f"{mlp}.linear_fc2", "act", end="input")
    yield place(f"{mlp}.linear_fc2", "down_proj", access=WITH_BIAS)
    yield place(here, "mlp_residual")


class Tapped(SiteHooks):
    """Hooks on a live GPTModel."""

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        tap: Tap | None,
        editor: Editor | None,
        ranks: Ranks,
        sharded_rows: bool,
    ) -> None:
        """`sharded_rows`: whether the residual stream is cut along the sequence (sp=1)."""
        places = megatron_places(model, shape, ranks.world)
        super().__init__(model, places, tap, editor, ranks.rank)
        self._ranks, self._sharded_rows = ranks, sharded_rows

    def at(self, given: ModelInput) -> None:
        """What the next forward computes."""
        rows, device, kept = given.rows, given.index.device, given.rows.sampled
        self._all = LiveRows.of(rows, rows.index, device)
        self._sampled = LiveRows(given.sampled, rows.sample[kept], rows.position[kept], rows.cells)
        share = rows.cells // self._ranks.world
        own = rows.index // share == self._ranks.rank
        index = torch.from_numpy(rows.index[own] % share).to(device)
        self._own = LiveRows(index, rows.sample[own], rows.position[own], share)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows:
        if place.rows == "sampled":
            return self._sampled
        return self._own if self._shares_rows(place) else self._all

    def _shares_rows(self, place: Place) -> bool:
        """Whether each rank holds some rows only."""
        return self._sharded_rows and place.layout is None

    def gather(self, local: torch.Tensor) -> list[torch.Tensor] | None:
        return gather(local, self._ranks)

    def observe(self, place: Place, value: torch.Tensor, rows: LiveRows) -> None:
        if self._shares_rows(place):
            parts = self.gather(value)
            value, rows = value if parts is None else torch.cat(parts), self._all
        if self._ranks.rank == 0 or place.layout is not None:
            super().observe(place, value, rows)

    def speaks_for(self, place: Place, site: str) -> bool:
        return self._shares_rows(place) or super().speaks_for(place, site)

    def install(self) -> None:
        """Rotary embedding is a function of megatron-core's attention module: it is wrapped for as
        long as the taps are in. Attention calls it for the query, then for the key."""
        from megatron.core.transformer import attention

        super().install()
        original = attention.apply_rotary_pos_emb

        def observed(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            self.rope(out)
            return out

        self.replace(attention, "apply_rotary_pos_emb", observed)
        # The kernels' attention rotates both by a module of its own.
        for layer in self._model.decoder.layers:
            if hasattr(layer.self_attention, "rope"):
                self.after(layer.self_attention.rope, self._rotated)

    def _rotated(self, _module: Any, _inputs: Any, out: Any) -> None:
        for part in out:
            self.rope(part)
