"""The Triton kernels of `embedding`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache

BLOCK = 1024


@triton.jit
def _embedding_fwd_kernel(ids_ptr, w_ptr, y_ptr, stride_w, H, V, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    row += tl.zeros((BLOCK,), tl.int64)
    known = (cols < H) & (row >= 0) & (row < V)
    y = tl.load(w_ptr + row * stride_w + cols, mask=known, other=float("nan"))
    tl.store(y_ptr + token * H + cols, y, mask=cols < H)


@triton.jit(do_not_specialize=["T"])
def _embedding_bwd_kernel(sorted_ptr, order_ptr, dy_ptr, dw_ptr, T, H, V, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(sorted_ptr + at).to(tl.int64)
    before = tl.load(sorted_ptr + at - 1, mask=at > 0, other=-1).to(tl.int64)
    if (row == before) | (row < 0) | (row >= V):
        return  # an id's first program adds all its tokens; ids outside of V have no gradient
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    total = tl.zeros((BLOCK,), tl.float32)
    here = row
    while here == row:
        token = tl.load(order_ptr + at)
        total += tl.load(dy_ptr + token * H + cols, mask=mask, other=0.0).to(tl.float32)
        at += 1
        here = tl.load(sorted_ptr + at, mask=at < T, other=-1).to(tl.int64)
    tl.store(dw_ptr + row * H + cols, total.to(dw_ptr.dtype.element_ty), mask=mask)


def forward(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows ids[T] of weight[V, H], whose rows are dense."""
    t, h = ids.numel(), weight.shape[1]
    y = torch.empty(t, h, dtype=weight.dtype, device=weight.device)
    if t and h:
        cache = shape_cache(ids.dtype, weight.shape, weight.stride(0), weight.dtype)
        launch(
            cache, _embedding_fwd_kernel, (t, cdiv(h, BLOCK), 1),
            (ids, weight, y, weight.stride(0), h, weight.shape[0], BLOCK),
            {"num_warps": 4},
        )  # fmt: skip
    return y


def backward(ids: Tensor, dy: Tensor, rows: int) -> Tensor:
    """dweight[rows, H]; the tokens of an id are added from front to back."""
    grad = torch.zeros(rows, dy.shape[1], dtype=dy.dtype, device=dy.device)
    if ids.numel() and dy.shape[1]:
        key, order = torch.sort(ids, stable=True)
        _embedding_bwd_kernel[(ids.numel(), cdiv(dy.shape[1], BLOCK))](
            key, order, dy, grad, ids.numel(), dy.shape[1], rows, BLOCK, num_warps=4
        )
    return grad
