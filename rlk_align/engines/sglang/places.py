"""Where the canonical operators are in an SGLang decoder."""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.experts import BY_EXPERT, has_kernels
from rlk_align.engines.common.fused_places import fused_places
from rlk_align.engines.common.places import Access, Place
from rlk_align.engines.sglang.experts import FUSED, sparse_blocks
from rlk_align.engines.sglang.head import HEAD
from rlk_align.model.shape import ModelShape


def sglang_places(model: Any, shape: ModelShape) -> Iterator[Place]:
    """The place of each site in a live model."""
    sparse = sparse_blocks(model)

    def block(layer: int) -> Iterator[Place] | None:
        return _block_places(layer, has_kernels(sparse[layer])) if layer in sparse else None

    def heads(op: str) -> Access:
        count = shape.heads if op == "q_norm" else shape.kv_heads

        # The norms of q and k see a row for each head of a token.
        def by_token(value: torch.Tensor) -> torch.Tensor:
            return value.view(-1, count * shape.head_dim)

        return Access(by_token, by_token, lambda value: value)

    yield from fused_places(model, shape, 1, f"logits_processor.{HEAD}", block, heads)


def _block_places(layer: int, kernels: bool) -> Iterator[Place]:
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
    for op in BY_EXPERT:
        yield Place(
            sites=(f"{name}.{op}",),
            module=here if kernels else f"{here}.experts",
            end="inside",
            unexposed="" if kernels else FUSED,
        )
    yield Place(sites=(f"{name}.moe_out",), module=here)
