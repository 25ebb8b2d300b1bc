"""The gated delta rule on the torch backend: checks of indices, and the calls of `portable` and
`gradient`."""

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.ops.delta_rule import gradient, portable
from rlk_kernels.ops.delta_rule.chunk import CHUNK
from rlk_kernels.ops.delta_rule.portable import Cache


def _bounds(cu: Tensor, rows: int) -> list[int]:
    bounds = cu.tolist()
    if bounds[0] < 0 or bounds[-1] > rows or sorted(bounds) != bounds:
        raise UnsupportedShape(
            f"gated_delta_rule: cu_seqlens {bounds} must rise from 0 to at most {rows}"
        )
    return bounds


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float
) -> Tensor:
    """out[T, Hv, E] of whole sequences."""
    bounds = _bounds(cu, len(q))
    count, (hk, d), (hv, e) = len(bounds) - 1, q.shape[1:], v.shape[1:]
    cache = Cache(
        g.new_zeros(count, hv, d, e),
        k.new_zeros(count, CHUNK, hk, d),
        v.new_zeros(count, CHUNK, hv, e),
        g.new_zeros(count, CHUNK, hv),
    )
    slots = torch.arange(count, device=q.device)
    return portable.forward(q, k, v, g, beta, cache, slots, [0] * count, bounds, scale, eps)


def cached(
    cache: tuple[Tensor, Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor, slots: Tensor, context: Tensor, cu: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """out[T, Hv, E] of rows that continue sequences; the cache is written."""
    bounds, contexts = _bounds(cu, len(q)), context.tolist()
    outside = [s for s in slots.tolist() if not 0 <= s < len(cache[0])]
    if outside:
        raise IndexError(
            f"cached_gated_delta_rule: slot {outside[0]} is not in 0..{len(cache[0]) - 1}"
        )
    if any(n < 0 for n in contexts):
        raise UnsupportedShape(
            f"cached_gated_delta_rule: context_lens {contexts} must not be negative"
        )
    return portable.forward(
        q, k, v, g, beta, Cache(*cache), slots.long(), contexts, bounds, scale, eps
    )


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta)."""
    return gradient.backward(q, k, v, g, beta, _bounds(cu, len(q)), scale, eps, do)
