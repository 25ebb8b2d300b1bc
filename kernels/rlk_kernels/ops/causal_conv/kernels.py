"""The Triton kernels of `causal_conv1d`: a program has BLOCK features of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.column_sum.operator import column_sum

BLOCK = 1024


@triton.jit
def _sequence(cu_ptr, t, B):
    """The last sequence that begins at row t or before it."""
    low = t * 0
    high = low + B
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) <= t:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _row_sum(
    x_ptr, w_ptr, cache_at, stride_row, stride_feature, t, place, has_cache, f, mask, F,
    W: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """The sum over the taps for row t, which has `place` rows of its sequence before it."""
    total = tl.zeros(f.shape, tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        inside = f < tl.where(place >= back, F, 0)
        x = tl.load(x_ptr + (t - back).to(tl.int64) * F + f, mask=inside, other=0.0)
        x = x.to(tl.float32)
        if CACHED:
            kept = f < tl.where((place < back) & has_cache, F, 0)
            old = cache_at + (place + j) * stride_row + f * stride_feature
            x += tl.load(old, mask=kept, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + f * W + j, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(w, x, total)
    return total


@triton.jit(do_not_specialize=["B", "N"])
def _forward_kernel(
    x_ptr, w_ptr, y_ptr, cache_ptr, stride_slot, stride_row, stride_feature, slots_ptr,
    context_ptr, cu_ptr, B, N, F,
    W: tl.constexpr, BLOCK: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    b = _sequence(cu_ptr, t, B)
    place = t - tl.load(cu_ptr + b)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < F
    at = cache_ptr
    has_cache = place < 0
    if CACHED:
        slot = tl.load(slots_ptr + b).to(tl.int64)
        has_cache = (slot >= 0) & (slot < N) & (tl.load(context_ptr + b) > 0)
        at += tl.where(has_cache, slot, 0) * stride_slot
    p = _row_sum(
        x_ptr, w_ptr, at, stride_row, stride_feature, t, place, has_cache, f, mask, F, W, CACHED
    )
    y = p / (1.0 + tl.exp(-p))
    tl.store(y_ptr + t.to(tl.int64) * F + f, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def _keep_kernel(
    x_ptr, cache_ptr, stride_slot, stride_row, stride_feature, slots_ptr, context_ptr, cu_ptr, N, F,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keeps a sequence's last W - 1 rows. Rows of `_forward_kernel` read what this writes over, so
    it runs after them."""
    b = tl.program_id(0)
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    writes = (slot >= 0) & (slot < N) & (begin < end)
    written = f < tl.where(writes, F, 0)
    continues = writes & (tl.load(context_ptr + b) > 0)
    at = cache_ptr + tl.where(writes, slot, 0) * stride_slot + f * stride_feature
    for r in tl.static_range(W - 1):  # a row moves to the front: what it overwrites was read before
        back = W - 1 - r
        new = end - back >= begin
        from_x = f < tl.where(writes & new, F, 0)
        row = tl.load(x_ptr + (end - back).to(tl.int64) * F + f, mask=from_x, other=0.0)
        from_cache = f < tl.where(continues & (end - back < begin), F, 0)
        kept = tl.load(at + (r + end - begin) * stride_row, mask=from_cache, other=0.0)
        tl.store(at + r * stride_row, row + kept, mask=written)


@triton.jit(do_not_specialize=["B"])
def _backward_kernel(
    x_ptr, w_ptr, dy_ptr, dp_ptr, columns_ptr, cu_ptr, B, T, F,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dp of a row, and its products for dweight, [W, T, F]."""
    t = tl.program_id(0)
    b = _sequence(cu_ptr, t, B)
    begin = tl.load(cu_ptr + b)
    place = t - begin
    is_row = (place >= 0) & (t < tl.load(cu_ptr + b + 1))
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < F
    p = _row_sum(x_ptr, w_ptr, x_ptr, 0, 0, t, place, place < 0, f, mask, F, W, False)
    s = 1.0 / (1.0 + tl.exp(-p))
    row = t.to(tl.int64)
    dy = tl.load(dy_ptr + row * F + f, mask=f < tl.where(is_row, F, 0), other=0.0).to(tl.float32)
    dp = dy * s * (1.0 + p * (1.0 - s))
    tl.store(dp_ptr + row * F + f, dp, mask=mask)
    for j in tl.static_range(W):
        back = W - 1 - j
        inside = f < tl.where(place >= back, F, 0)
        x = tl.load(x_ptr + (row - back) * F + f, mask=inside, other=0.0).to(tl.float32)
        tl.store(columns_ptr + (j * T + row) * F + f, dp * x, mask=mask)


@triton.jit(do_not_specialize=["B", "T"])
def _input_gradient_kernel(
    dp_ptr, w_ptr, dx_ptr, cu_ptr, B, T, F, W: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0)
    b = _sequence(cu_ptr, t, B)
    end = tl.load(cu_ptr + b + 1)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < F
    row = t.to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(W):
        later = W - 1 - j
        inside = f < tl.where(t + later < end, F, 0)
        dp = tl.load(dp_ptr + (row + later) * F + f, mask=inside, other=0.0)
        total = tl.fma(tl.load(w_ptr + f * W + j, mask=mask, other=0.0).to(tl.float32), dp, total)
    tl.store(dx_ptr + row * F + f, total.to(dx_ptr.dtype.element_ty), mask=mask)


def _run(
    x: Tensor, weight: Tensor, cu: Tensor, cache: Tensor | None, slots: Tensor, context: Tensor
) -> Tensor:
    (t, f), taps, y = x.shape, weight.shape[1], empty(x.shape, x.dtype, x.device)
    sequences = cu.numel() - 1
    if not y.numel() or not sequences:
        return y
    block = min(BLOCK, power_of_2(f))
    held = x.new_empty(0, 0, 0) if cache is None else cache
    shapes = shape_cache("causal_conv1d", f, taps, x.dtype, held.stride(), cache is not None)
    launch(
        shapes, _forward_kernel, (t, cdiv(f, block), 1),
        (x, weight, y, x if cache is None else cache, *held.stride(), slots, context, cu, sequences,
         len(held), f, taps, block, cache is not None),
        {"num_warps": 4},
    )  # fmt: skip
    if cache is not None:
        launch(
            shapes, _keep_kernel, (sequences, cdiv(f, block), 1),
            (x, cache, *cache.stride(), slots, context, cu, len(cache), f, taps, block),
            {"num_warps": 4},
        )  # fmt: skip
    return y


def forward(x: Tensor, weight: Tensor, cu: Tensor) -> Tensor:
    """y[T, F]."""
    return _run(x, weight, cu, None, cu, cu)


def cached(
    cache: Tensor, x: Tensor, weight: Tensor, slots: Tensor, context: Tensor, cu: Tensor
) -> Tensor:
    """y[T, F] of rows that continue sequences; the cache is written."""
    return _run(x, weight, cu, cache, slots, context)


def backward(x: Tensor, weight: Tensor, cu: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight in fp32)."""
    (t, f), taps, sequences = x.shape, weight.shape[1], cu.numel() - 1
    dx = empty(x.shape, x.dtype, x.device)
    columns = torch.zeros(taps, t, f, device=x.device)
    if x.numel() and sequences:
        block = min(BLOCK, power_of_2(f))
        grid, options = (t, cdiv(f, block), 1), {"num_warps": 4}
        dp = empty(x.shape, torch.float32, x.device)
        shapes = shape_cache("causal_conv1d_backward", f, taps, x.dtype, dy.dtype)
        launch(
            shapes, _backward_kernel, grid,
            (x, weight, dy, dp, columns, cu, sequences, t, f, taps, block), options,
        )  # fmt: skip
        launch(
            shapes, _input_gradient_kernel, grid,
            (dp, weight, dx, cu, sequences, t, f, taps, block), options,
        )  # fmt: skip
    return dx, torch.stack([column_sum(column, "triton") for column in columns], 1)
