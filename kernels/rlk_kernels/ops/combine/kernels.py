"""The Triton kernels of `combine_experts`: a program computes BLOCK features of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.overlap import begin_overlapped

BLOCK = 1024
SEPARATE = {"num_warps": 4, "enable_fp_fusion": False}
"""Products and sums are rounded one by one, as on the torch backend."""


@triton.jit
def _combine_fwd_kernel(
    y_ptr, w_ptr, ids_ptr, out_ptr, H, E, K: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        slot = token * K + j
        if WEIGHTED:
            expert = tl.load(ids_ptr + slot)
            taken = (expert >= 0) & (expert < E)
            here = cols < tl.where(taken, H, 0)
            y = tl.load(y_ptr + slot * H + cols, mask=here, other=0.0).to(tl.float32)
            total += tl.where(taken, y * tl.load(w_ptr + slot), 0.0)
        else:
            total += tl.load(y_ptr + slot * H + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_bwd_kernel(
    dy_ptr, y_ptr, w_ptr, ids_ptr, drows_ptr, dw_ptr, H, E, K: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    token = slot // K
    expert = tl.load(ids_ptr + slot)
    taken = (expert >= 0) & (expert < E)
    w = tl.load(w_ptr + slot)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        here = cols < tl.where(taken, H, 0)
        dy = tl.load(dy_ptr + token * H + cols, mask=here, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + slot * H + cols, mask=here, other=0.0).to(tl.float32)
        total += dy * y
        drow = tl.where(taken, dy * w, 0.0)
        tl.store(drows_ptr + slot * H + cols, drow.to(drows_ptr.dtype.element_ty), mask=cols < H)
    tl.store(dw_ptr + slot, tl.sum(total, 0))


def forward(rows: Tensor, weights: Tensor | None, ids: Tensor | None, experts: int) -> Tensor:
    """y[T, H]; without weights and ids, the plain sum."""
    t, k, h = rows.shape
    y = empty((t, h), rows.dtype, rows.device)
    weighted = weights is not None
    if y.numel():
        overlap = facts(rows.device).overlaps
        cache = shape_cache("combine", k, h, experts, weighted, rows.dtype, rows.device)
        launch(
            cache, _combine_fwd_kernel, (t, cdiv(h, BLOCK), 1),
            (rows, weights if weighted else rows, ids if weighted else rows, y, h, experts, k,
             weighted, BLOCK, overlap),
            SEPARATE | {"launch_pdl": overlap},
        )  # fmt: skip
    return y


def backward(
    dy: Tensor, rows: Tensor, weights: Tensor, ids: Tensor, experts: int
) -> tuple[Tensor, Tensor]:
    """(drows, dweights)."""
    t, k, h = rows.shape
    drows, dweights = torch.empty_like(rows), torch.zeros_like(weights)
    if rows.numel():
        cache = shape_cache("combine_backward", k, h, experts, rows.dtype, rows.device)
        launch(
            cache, _combine_bwd_kernel, (t * k, 1, 1),
            (dy, rows, weights, ids, drows, dweights, h, experts, k, BLOCK), SEPARATE,
        )  # fmt: skip
    return drows, dweights
