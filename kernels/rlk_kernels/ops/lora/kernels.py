"""The Triton kernel of `add_lora`: a program computes a tile of rows and features.

It multiplies its rows by the weight of each slot that one of them has, and writes the rows of that
slot; rows without an adapter are written with those of the first slot. Few rows are computed by a
program for each slot, many rows by one program for all slots. The tile's shape depends on the
weights alone, so a row has the bits that it has alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty

ROWS = 64
MOST_FEATURES = 64
"""The largest side of a tile of features."""
MOST_STEP = {2: 256, 4: 64}
"""Bytes of a number -> the longest step of a sum. In a step of decode one program computes a whole
sum and waits for its copies, so a few long steps take less time than many short ones."""
WEIGHTS = 8192
"""The most numbers of a weight in a tile: more do not fit into registers."""
FEW = 1024
"""Up to so many rows, each slot has programs of its own."""
STAGES, SHARED = 4, 200_000
"""The most steps whose operands are in shared memory, and its bytes."""


@triton.jit(do_not_specialize=["T"])
def _rows_by_slot_kernel(
    x_ptr, w_ptr, scales_ptr, slots_ptr, base_ptr, out_ptr, T, F, K, S,
    stride_xt, stride_xk, stride_ws, stride_wf, stride_wk, stride_bt, stride_bf,
    HAS_SLOTS: tl.constexpr, SCALED: tl.constexpr, HAS_BASE: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    cols = tl.program_id(1).to(tl.int64) * BF + tl.arange(0, BF)
    ks = tl.arange(0, BK)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + rows, mask=rows < T, other=-1)
    else:
        slot = tl.where(rows < T, 0, -1)
    known = (slot >= 0) & (slot < S)
    scale = tl.load(scales_ptr + tl.where(known, slot, 0), mask=known, other=0.0)
    taken = known & (scale != 0.0)
    for s in range(tl.program_id(2), S, tl.num_programs(2)):
        mine = taken & (slot == s)
        written = mine | ((s == 0) & (rows < T) & ~taken)
        if tl.max(written.to(tl.int32), 0) > 0:
            total = tl.zeros((BT, BF), tl.float32)
            if tl.max(mine.to(tl.int32), 0) > 0:
                for step in range(tl.cdiv(K, BK)):
                    k = step * BK + ks.to(tl.int64)
                    x = tl.load(
                        x_ptr + rows[:, None] * stride_xt + k[None, :] * stride_xk,
                        mask=mine[:, None] & (k[None, :] < K), other=0.0,
                    )  # fmt: skip
                    w = tl.load(
                        w_ptr + s * stride_ws + k[:, None] * stride_wk + cols[None, :] * stride_wf,
                        mask=(k[:, None] < K) & (cols[None, :] < F), other=0.0,
                    )  # fmt: skip
                    total = tl.dot(x, w, total, input_precision="ieee")
            if SCALED:
                total = total * scale[:, None]
            mask = written[:, None] & (cols[None, :] < F)
            value = total.to(out_ptr.dtype.element_ty)
            if HAS_BASE:
                base = tl.load(
                    base_ptr + rows[:, None] * stride_bt + cols[None, :] * stride_bf,
                    mask=mask, other=0.0,
                )  # fmt: skip
                value = (base.to(tl.float32) + total).to(out_ptr.dtype.element_ty)
                value = tl.where(taken[:, None], value, base)
            tl.store(out_ptr + rows[:, None] * F + cols[None, :], value, mask=mask)


def rows_by_slot(
    x: Tensor, weight: Tensor, scales: Tensor, slots: Tensor | None, scaled: bool,
    base: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `portable.rows_by_slot`."""
    (t, k), (s, f) = x.shape, weight.shape[:2]
    out = empty((t, f), x.dtype, x.device)
    if out.numel() == 0:
        return out
    added = out if base is None else base
    has_slots = slots is not None
    side, step = (max(16, power_of_2(n)) if n else 16 for n in (f, k))
    cache = shape_cache(
        "lora", k, s, f, x.stride(), weight.stride(), added.stride(), x.dtype, x.device,
        None if slots is None else slots.dtype, scaled, base is None,
    )  # fmt: skip
    size, features = x.element_size(), min(side, MOST_FEATURES)
    tile = ROWS, features, min(step, MOST_STEP[size], WEIGHTS // features)
    stages = min(STAGES, SHARED // ((ROWS + features) * tile[2] * size))
    launch(
        cache, _rows_by_slot_kernel, (cdiv(t, ROWS), cdiv(f, features), s if t <= FEW else 1),
        (x, weight, scales, slots if has_slots else scales, added, out, t, f, k, s, *x.stride(),
         *weight.stride(), *added.stride(), has_slots, scaled, base is not None, *tile),
        {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": False},
    )  # fmt: skip
    return out
