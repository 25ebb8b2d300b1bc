"""The Triton kernel of `add_lora` for any number of rows: a program computes a tile of rows and
features.

It multiplies its rows by the weight of each slot that one of them has, and writes the rows of that
slot; rows without an adapter are written with those of the first slot. Up to FEW rows are computed
by a program for each slot, more rows by one program for all slots. A program computes all segments
of its sums; `few_rows` computes those of few rows at the same time. The steps of a sum depend on
the weights alone, so a row has the bits that it has alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.lora import few_rows
from rlk_kernels.ops.lora.few_rows import FEW, ROWS, SEGMENT, tile_of

STAGES, SHARED = 4, 200_000
"""The most steps whose operands are in shared memory, and its bytes."""


@triton.jit(do_not_specialize=["T"])
def _rows_by_slot_kernel(
    x_ptr, w_ptr, scales_ptr, slots_ptr, base_ptr, out_ptr, T, F, K, S,
    stride_xt, stride_xk, stride_ws, stride_wf, stride_wk, stride_bt, stride_bf, stride_ot,
    HAS_SLOTS: tl.constexpr, SCALED: tl.constexpr, HAS_BASE: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, SEGMENT: tl.constexpr,
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
        written = (rows < T) & (tl.where(taken, slot, 0) == s)
        mine = written & taken
        if tl.max(written.to(tl.int32), 0) > 0:
            total, part = tl.zeros((BT, BF), tl.float32), tl.zeros((BT, BF), tl.float32)
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
                    part = tl.dot(x, w, part, input_precision="ieee")
                    ends = (step + 1) % (SEGMENT // BK) == 0
                    total = tl.where(ends, total + part, total)
                    part = tl.where(ends, 0.0, part)
            total = total + part
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
            tl.store(out_ptr + rows[:, None] * stride_ot + cols[None, :], value, mask=mask)


def rows_by_slot(
    x: Tensor, weight: Tensor, scales: Tensor, slots: Tensor | None, scaled: bool,
    base: Tensor | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `portable.rows_by_slot`. The result is written to `out`, if given, whose rows are
    dense."""
    (t, k), (s, f) = x.shape, weight.shape[:2]
    if out is None:
        out = empty((t, f), x.dtype, x.device)
    if out.numel() == 0:
        return out
    added = out if base is None else base
    has_slots = slots is not None
    cache = shape_cache(
        "lora", k, s, f, x.stride(), weight.stride(), added.stride(), out.stride(), x.dtype,
        x.device, None if slots is None else slots.dtype, scaled, base is None,
    )  # fmt: skip
    size = x.element_size()
    features, step = tile_of(f, k, size)
    stages = min(STAGES, SHARED // ((ROWS + features) * step * size))
    launch(
        cache, _rows_by_slot_kernel, (cdiv(t, ROWS), cdiv(f, features), s if t <= FEW else 1),
        (x, weight, scales, slots if has_slots else scales, added, out, t, f, k, s, *x.stride(),
         *weight.stride(), *added.stride(), out.stride(0), has_slots, scaled, base is not None,
         ROWS, features, step, SEGMENT),
        {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": False},
    )  # fmt: skip
    return out


def add_lora(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None,
    widths: list[int],
) -> Tensor:  # fmt: skip
    """See `portable.add_lora`."""
    out = empty((x.shape[0], b.shape[1]), x.dtype, x.device)
    if out.numel() == 0:
        return out
    if few_rows.fit(x, a, widths):
        few_rows.add_lora(out, base, x, a, b, scales, slots, widths)
        return out
    columns = (each.split(widths, 1) for each in (b, base, out))
    for a_p, scales_p, b_p, base_p, out_p in zip(a, scales, *columns, strict=True):
        h = rows_by_slot(x, a_p, scales_p, slots, False, None)
        rows_by_slot(h, b_p, scales_p, slots, True, base_p, out_p)
    return out
