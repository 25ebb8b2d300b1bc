"""Sparse layers for tests of their operators, on the CPU and on GPUs.

T = tokens, E = experts, k = experts of a token
"""

import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.ops.linear import linear
from torch import Tensor

SPREADS = ("even", "skewed", "one", "dropped")


def chosen(t: int, experts: int, k: int, spread: str, device: str, seed: int = 0) -> Tensor:
    """int32 [T, k], ascending: spread evenly; mostly to a few experts, some without any; all to the
    same k; and with every third slot dropped."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(t, experts, generator=generator)
    if spread == "skewed":
        scores[:, :: max(1, experts // k)] += 0.9
        scores[:, experts // 2] = -1.0
    if spread == "one":
        scores[:] = torch.arange(experts, 0, -1)
    ids = scores.topk(k, -1).indices.sort(-1).values.int()
    if spread == "dropped":
        slots = torch.arange(t * k).view(t, k)
        ids = torch.where(slots % 3 == 1, experts, ids).sort(-1).values
    return ids.to(device)


def weights(experts: int, n: int, k: int, dtype: torch.dtype, device: str) -> Tensor:
    return rand(experts, n, k, dtype=dtype, device=device, seed=11, scale=k**-0.5)


def by_linear(x: Tensor, weight: Tensor, ids: Tensor, backend: str | None) -> Tensor:
    """`grouped_linear`, each slot by `linear` of one row."""
    rows = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    y = x.new_zeros(*ids.shape, weight.shape[1])
    for e in range(weight.shape[0]):
        at = ids == e
        if bool(at.any()):
            y[at] = linear(rows[at].contiguous(), weight[e], backend=backend)
    return y


def layer(
    x: Tensor, router: Tensor, up: Tensor, down: Tensor, k: int, backend: str | None
) -> Tensor:
    """A sparse layer's output [T, H]."""
    logits = rk.linear(x, router, out_dtype=torch.float32, backend=backend)
    shares, ids = rk.route(logits, k, backend=backend)
    groups = rk.group_by_expert(ids, len(up), backend=backend)
    both = rk.grouped_linear(x, up, groups, backend=backend)
    act = rk.swiglu(*both.chunk(2, -1), backend=backend)
    rows = rk.grouped_linear(act, down, groups, backend=backend)
    return rk.combine_experts(rows, shares, ids, len(up), backend=backend)
