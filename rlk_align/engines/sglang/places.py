"""Where the canonical operators are in an SGLang decoder."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from rlk_align.engines.common.experts import has_kernels
from rlk_align.engines.common.fused_places import expert_places, fused_places
from rlk_align.engines.common.layout import padded
from rlk_align.engines.common.places import Access, Place
from rlk_align.engines.sglang.experts import FUSED, sparse_blocks
from rlk_align.engines.sglang.head import HEAD
from rlk_align.model.shape import ModelShape


def sglang_places(model: Any, shape: ModelShape, tp: int) -> Iterator[Place]:
    """The place of each site in a live model of `tp` ranks."""
    sparse = sparse_blocks(model)

    def block(layer: int) -> Iterator[Place] | None:
        if layer not in sparse:
            return None
        return _block_places(layer, shape, tp, has_kernels(sparse[layer]))

    def heads(op: str) -> Access:
        count = (shape.heads if op == "q_norm" else shape.kv_heads) // tp

        # The norms of q and k see a row for each head of a token.
        def by_token(value: torch.Tensor) -> torch.Tensor:
            return value.view(-1, count * shape.head_dim)

        return Access(by_token, by_token, lambda value: value)

    for place in fused_places(model, shape, tp, f"logits_processor.{HEAD}", block, heads):
        if place.sites == ("logits",):
            # The module computes a rank's part of the vocabulary.
            rows = model.lm_head.weight.shape[0]
            yield replace(place, layout=padded("logits", shape.vocab, rows, tp))
        elif tp > 1 and place.end == "output" and place.sites[0].rpartition(".")[2] in _SUMS:
            yield _summed(place, shape)
        else:
            yield place


_SUMS = ("o_proj", "down_proj", "moe_out")
"""The operators whose modules return partial sums, or in some versions the sums."""


def _summed(place: Place, shape: ModelShape) -> Place:
    """The place of a sum over the ranks, which SGLang adds up before the norm that reads it: on a
    CPU outside of the module, on a GPU in some modules themselves."""
    layers, number, op = place.sites[0].split(".")
    norm = f"model.{layers}.{number}.post_attention_layernorm"
    if op != "o_proj":
        following = int(number) + 1
        norm = f"model.{layers}.{following}.input_layernorm"
        if following == shape.layers:
            norm = "model.norm"
    return replace(place, module=norm, end="input", parameters_in=place.holder)


def _block_places(layer: int, shape: ModelShape, tp: int, kernels: bool) -> Iterator[Place]:
    """`kernels`: whether the block computes everything in it with the kernels, without modules."""
    name, here = f"layers.{layer}", f"model.layers.{layer}.mlp"
    if kernels:
        yield Place(
            sites=(f"{name}.router",), module=here, end="inside", parameters_in=f"{here}.gate"
        )
    else:
        yield Place(sites=(f"{name}.router",), module=f"{here}.gate")
    for op in ("experts", "routing_weights"):
        module = here if kernels else f"{here}.topk"
        yield Place(sites=(f"{name}.{op}",), module=module, end="inside")
    module, unexposed = (here, "") if kernels else (f"{here}.experts", FUSED)
    yield from expert_places(name, module, shape, tp, unexposed)
    yield Place(sites=(f"{name}.moe_out",), module=here)
