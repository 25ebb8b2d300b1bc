"""The Triton kernels of `add_lora` for few rows: two launches for all projections of one x.

`_segments_kernel` computes each segment of each sum over K by a program of its own, so that one
row suffices to fill a GPU. `_expand_kernel` adds the segments of a row from front to back, which
is the order of `kernels`, and multiplies by B. A program is for one slot, and ends if no row of its
tile has that slot. Before it waits for the first kernel, the second one reads what that kernel does
not write: it has waited for all earlier writes itself (`begin_overlapped`).
"""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.overlap import begin_overlapped

SEGMENT = 512
"""Numbers of a segment of a sum; the last one may be shorter. It is the order of a sum: another
length changes bits."""
LONGEST_STEP = {2: 256, 4: 64}
"""Bytes of a number -> the longest step of a sum, which divides SEGMENT. A program waits for each
step's copies, so a few long steps take less time than many short ones."""
FEW = 1024
"""The most rows that are few. More rows fill a GPU by themselves, and adding up their segments
would take longer than computing these one after another."""
MOST_SEGMENTS, MOST_RANK, MOST_SLICES = 64, 64, 3
"""The most segments that are added in registers, and the largest rank; q, k and v are the most
projections of one x."""
MOST_LOADS = 12
"""The most segments whose loads do not wait for one another."""
FEWEST = 16
"""The rows of the smallest tile; more rows are in tiles of ROWS."""
ROWS = 64
MOST_FEATURES = 64
"""The largest side of a tile of features."""
WEIGHTS = 8192
"""The most numbers of a weight in a tile: more do not fit into registers."""


def tile_of(features: int, k: int, size: int) -> tuple[int, int]:
    """(features of a tile, numbers of a step) of products over k numbers of `size` bytes."""
    side = min(max(16, power_of_2(features)) if features else 16, MOST_FEATURES)
    step = max(16, power_of_2(k)) if k else 16
    return side, min(step, LONGEST_STEP[size], WEIGHTS // side)


@triton.jit
def _slots_of(slots_ptr, rows, T, HAS_SLOTS: tl.constexpr):
    """The slot of each row; -1 beyond the last row."""
    if HAS_SLOTS:
        return tl.load(slots_ptr + rows, mask=rows < T, other=-1)
    else:
        return tl.where(rows < T, 0, -1)


@triton.jit(do_not_specialize=["T"])
def _segments_kernel(
    x_ptr, a_ptr, scales_ptr, slots_ptr, parts_ptr, T, R, K, S, G,
    stride_xt, stride_xk, stride_ap, stride_as, stride_ar, stride_ak,
    HAS_SLOTS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, SEGMENT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """parts[G, T, P, R] of x[T, K] and a[P, S, R, K], for rows with an adapter."""
    begin_overlapped(OVERLAP)
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    p, s = tl.program_id(1) % P, tl.program_id(2) // G
    cols = tl.program_id(1) // P * BR + tl.arange(0, BR)
    g = (tl.program_id(2) % G).to(tl.int64)
    scale = tl.load(scales_ptr + p * S + s)
    mine = _slots_of(slots_ptr, rows, T, HAS_SLOTS) == s
    if (tl.max(mine.to(tl.int32), 0) > 0) & (scale != 0.0):
        a_ptr += p.to(tl.int64) * stride_ap + s.to(tl.int64) * stride_as
        part = tl.zeros((BT, BR), tl.float32)
        for step in range(tl.cdiv(tl.minimum(K - g * SEGMENT, SEGMENT), BK)):
            k = g * SEGMENT + step * BK + tl.arange(0, BK)
            x = tl.load(
                x_ptr + rows[:, None] * stride_xt + k[None, :] * stride_xk,
                mask=mine[:, None] & (k[None, :] < K), other=0.0,
            )  # fmt: skip
            a = tl.load(
                a_ptr + k[:, None] * stride_ak + cols[None, :] * stride_ar,
                mask=(k[:, None] < K) & (cols[None, :] < R), other=0.0,
            )  # fmt: skip
            part = tl.dot(x, a, part, input_precision="ieee")
        at = parts_ptr + (g * T + rows[:, None]) * (P * R) + p * R + cols[None, :]
        tl.store(at, part, mask=mine[:, None] & (cols[None, :] < R))


@triton.jit(do_not_specialize=["T"])
def _expand_kernel(
    base_ptr, parts_ptr, b_ptr, scales_ptr, slots_ptr, out_ptr, T, N, R, S, SECOND, THIRD,
    stride_bt, stride_bn, stride_ws, stride_wn, stride_wr,
    HAS_SLOTS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, UNROLL: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[T, N] of base[T, N], parts[G, T, P, R] and b[S, N, R]. SECOND, THIRD: the first columns
    of these projections, if there are so many."""
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    p, s = tl.program_id(2) % P, tl.program_id(2) // P
    first = tl.where(p == 0, 0, tl.where(p == 1, SECOND, THIRD))
    end = tl.where(p == P - 1, N, tl.where(p == 0, SECOND, THIRD))
    first += tl.program_id(1) * BN
    slot = _slots_of(slots_ptr, rows, T, HAS_SLOTS)
    known = (slot >= 0) & (slot < S)
    scale = tl.load(scales_ptr + p * S + tl.where(known, slot, 0), mask=known, other=0.0)
    taken = known & (scale != 0.0)
    written = (rows < T) & (tl.where(taken, slot, 0) == s)
    if (tl.max(written.to(tl.int32), 0) > 0) & (first < end):
        cols, rank = first + tl.arange(0, BN).to(tl.int64), tl.arange(0, BR)
        mask = written[:, None] & (cols[None, :] < end)
        base = tl.load(
            base_ptr + rows[:, None] * stride_bt + cols[None, :] * stride_bn, mask=mask, other=0.0
        )
        b = tl.load(
            b_ptr + s.to(tl.int64) * stride_ws + rank[:, None] * stride_wr
            + cols[None, :] * stride_wn,
            mask=(rank[:, None] < R) & (cols[None, :] < end), other=0.0,
        )  # fmt: skip
        begin_overlapped(OVERLAP)
        at = parts_ptr + rows[:, None] * (P * R) + p * R + rank[None, :]
        used = (written & taken)[:, None] & (rank[None, :] < R)
        h = tl.zeros((BT, BR), tl.float32)
        # Two turns at least: without a loop, each load would be moved to another layout by itself.
        for g in tl.range(0, G, loop_unroll_factor=UNROLL):
            h += tl.load(at + tl.cast(T, tl.int64) * (g * P * R), mask=used, other=0.0)
        total = tl.zeros((BT, BN), tl.float32)
        total = tl.dot(h.to(b.dtype), b, total, input_precision="ieee") * scale[:, None]
        value = (base.to(tl.float32) + total).to(base.dtype)
        value = tl.where(taken[:, None], value, base)
        tl.store(out_ptr + rows[:, None] * N + cols[None, :], value, mask=mask)


def fit(x: Tensor, a: Tensor, widths: list[int]) -> bool:
    """Whether the kernels take x[T, K] and a[P, S, R, K]."""
    (t, k), r = x.shape, a.shape[2]
    segments = cdiv(k, SEGMENT)
    return (
        t <= FEW and 0 < segments <= MOST_SEGMENTS and 0 < r <= MOST_RANK
        and len(widths) <= MOST_SLICES
    )  # fmt: skip


def add_lora(
    out: Tensor, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor,
    slots: Tensor | None, widths: list[int],
) -> None:  # fmt: skip
    """Writes the result of `portable.add_lora` to out[T, N]. The arguments `fit`."""
    (t, k), (slices, s, r) = x.shape, a.shape[:3]
    n, segments, size, here = out.shape[1], cdiv(k, SEGMENT), x.element_size(), facts(x.device)
    parts = empty((segments, t, slices * r), scales.dtype, x.device)
    of, has_slots = (scales if slots is None else slots), slots is not None
    cache = shape_cache(
        "few lora", k, a.shape, *widths, x.stride(), a.stride(), b.stride(), base.stride(), x.dtype,
        x.device, of.dtype, has_slots,
    )  # fmt: skip
    rows, tile = FEWEST if t <= FEWEST else ROWS, tile_of(r, k, size)
    common = {"enable_fp_fusion": False, "launch_pdl": here.overlaps}
    launch(
        cache, _segments_kernel, (cdiv(t, rows), cdiv(r, tile[0]) * slices, segments * s),
        (x, a, scales, of, parts, t, r, k, s, segments, *x.stride(), *a.stride(), has_slots, slices,
         rows, *tile, SEGMENT, here.overlaps),
        {"num_warps": 4, "num_stages": 3 if rows == FEWEST else 2, **common}, (rows,),
    )  # fmt: skip
    # A program reads all segments of its rows: many rows take fewer, wider programs.
    columns = 64 if size == 4 else 128 if t <= ROWS else 256
    at_once = max(1, min(MOST_LOADS, segments // 2))
    starts = [sum(widths[:i]) for i in (1, 2)]
    launch(
        cache, _expand_kernel, (cdiv(t, rows), cdiv(max(widths), columns), s * slices),
        (base, parts, b, scales, of, out, t, n, r, s, *starts, *base.stride(), *b.stride(),
         has_slots, slices, segments, at_once, rows, columns, max(16, power_of_2(r)),
         here.overlaps),
        {"num_warps": 8 if columns == 256 else 4, "num_stages": 1, **common}, (rows, columns),
    )  # fmt: skip
