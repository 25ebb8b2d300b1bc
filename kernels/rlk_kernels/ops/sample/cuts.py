"""Where the kept columns of a row end: the Triton kernels that find each row's cut (launched by
`find_cuts.py`).

A cut is a logit and a column: kept are the columns up to it in the order of `sample`. It is found
without a sort, in two phases: the first lets top_k columns through, the second ceil(top_p * mass).
In both, each column has a weight (1, or its mass), and the cut is the first column at which the
running sum of weights reaches a need.

    list    sums the masses of all columns, as exact integers, and lists the columns above the first
            value of the guides, below which no more than half of the mass lies that top_p drops. If
            the list has room for them, as it does for most models, nothing else is read.
    guide   (twice) sums the weights above 15 values between the bounds, in fp32, and the bounds
            close in on the two values around the need. Counts are exact. Sums of masses have an
            error far below SLACK, by which the bounds keep away from the need: so the cut lies
            between them, wherever the values are.
    gather  sums, as exact integers, what lies above the upper bound, and lists the columns between
            the bounds.
    decide  finds the cut among the listed columns: four bits at a time of (logit, column), from the
            highest, in one program a row. If the list is full, it reads the row itself.

Programs of a row add to shared memory integers alone, so their order changes nothing.
"""

import triton
import triton.language as tl

from rlk_kernels.numerics.lse_tree.kernels import LN2, NO_COLUMNS, merge_neighbours, scaled
from rlk_kernels.ops.overlap import begin_overlapped
from rlk_kernels.ops.sample.walk_kernels import MASS, divided, is_kept

LISTED = 4096
"""The most listed columns of a row."""
CHUNK, DECIDING_WARPS = 512, 8
"""Columns of a step of `decide`."""
PART, GUIDING_WARPS = 1024, 1
"""Columns of a step of `guide`."""
SUMS = tl.constexpr(16)
SLACK = tl.constexpr(6.1035e-5)
LEAST = tl.constexpr(-3.4028234663852886e38)
COLUMN_BITS = tl.constexpr(24)
LAST_COLUMN = tl.constexpr((1 << 24) - 1)
MOST_LISTED = tl.constexpr(LISTED)
LOGIT_DIGITS, DIGITS = tl.constexpr(8), tl.constexpr(14)
"""Of four bits, in 32 bits of a logit, and with COLUMN_BITS."""


def column_digits(columns: int) -> int:
    """The digits of four bits in which the numbers of columns differ."""
    return max(1, -(-(columns - 1).bit_length() // 4))


@triton.jit
def _start_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, nodes_ptr, tops_ptr, bottoms_ptr, roots_ptr,
    cuts_ptr, cut_columns_ptr, ks_ptr, ps_ptr, bounds_ptr, counters_ptr, T, V, nodes,
    NODES: tl.constexpr, LEVELS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The root of a row, the cut of min_p, and the first bounds of both phases."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, NODES)[None, :]
    known = block < nodes
    at = nodes_ptr + (row * nodes + block) * 2
    n = tl.load(at, mask=known, other=NO_COLUMNS)
    s = tl.load(at + 1, mask=known, other=0.0)
    n, s, _ = merge_neighbours(n, s, s, 1, NODES, LEVELS, False)
    n, s = tl.sum(tl.sum(n, 1), 0), tl.sum(tl.sum(s, 1), 0)
    tl.store(roots_ptr + row * 2, n)
    tl.store(roots_ptr + row * 2 + 1, s)
    at = row * nodes + block
    top = tl.max(tl.max(tl.load(tops_ptr + at, mask=known, other=float("-inf")), 1), 0)
    bottom = tl.min(tl.min(tl.load(bottoms_ptr + at, mask=known, other=float("inf")), 1), 0)
    temperature = tl.load(temperature_ptr + row)
    draws = temperature > 0.0
    cut = LEAST
    if HAS_MIN:
        min_p = tl.load(min_p_ptr + row)
        far = temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
        lowest = (top.to(tl.float64) + far).to(tl.float32)
        cut = tl.where(draws & (min_p > 0.0), tl.maximum(lowest, LEAST), LEAST)
    tl.store(cuts_ptr + row, cut)
    tl.store(cut_columns_ptr + row, V)
    floor = tl.maximum(bottom, cut)
    if HAS_K:
        top_k = tl.load(top_k_ptr + row)
        tl.store(ks_ptr + row, tl.where(draws & (top_k > 0) & (top_k < V), top_k, 0))
        near = top - 32.0 * tl.maximum(temperature, 1.0)
        _store_bounds(bounds_ptr + row * 4, float("-inf"), tl.maximum(floor, near), top)
    top_p = 1.0
    if HAS_P:
        top_p = tl.load(top_p_ptr + row)
        top_p = tl.where(draws & (top_p < 1.0), top_p, 1.0)
        tail = 0.5 * tl.maximum(1.0 - top_p, 1e-7) / V
        near = temperature * LN2 * (n + tl.log2(s) + tl.log2(tail))
        at = bounds_ptr + (3 * T + row) * 4
        _store_bounds(at, float("-inf"), tl.maximum(floor, tl.minimum(near, top)), top)
    tl.store(ps_ptr + row, top_p)
    i = tl.arange(0, 8)
    tl.store(counters_ptr + (i // 4 * T + row) * 4 + i % 4, tl.zeros((8,), tl.int64))


@triton.jit
def _store_bounds(at, low, start, high, listed=float("inf")):
    tl.store(at, low)
    tl.store(at + 1, start)
    tl.store(at + 2, high)
    tl.store(at + 3, listed)


@triton.jit
def _load_bounds(at):
    """(low, start, high, listed): the cut is above low and at most high; values are tried from
    start on; columns above low, or inf if they are not counted."""
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _value(start, high, step):
    """The value `step` sixteenths from start to high, with one rounding in every kernel."""
    return tl.fma(high - start, step, start)


@triton.jit
def _narrowed(sums_ptr, nodes, low, start, high, bottom, need, NODES: tl.constexpr,
              COUNT: tl.constexpr):  # fmt: skip
    """The bounds after the sums of a guide, for a need in the unit of these sums."""
    i = tl.arange(0, SUMS)[None, :]
    block = tl.arange(0, NODES)[:, None]
    sums = tl.load(sums_ptr + block * SUMS + i, mask=block < nodes, other=0.0)
    w = tl.sum(sums, 0)
    i = tl.arange(0, SUMS)
    value = _value(start, high, (i - 1).to(tl.float32) * 0.0625)
    slack = 0.0 if COUNT else SLACK
    enough, few = w >= need * (1.0 + slack), w < need * (1.0 - slack)
    above = tl.max(tl.where(enough & (i > 0), value, float("-inf")), 0)
    below = tl.min(tl.where(few & (i > 0), value, float("inf")), 0)
    low, high = tl.maximum(low, above), tl.minimum(high, below)
    listed = float("inf")
    if COUNT:
        listed = tl.min(tl.where(enough, w, float("inf")), 0)
    start = tl.where(low > float("-inf"), low, tl.where(high <= start, bottom, start))
    return low, start, high, listed


@triton.jit
def _need(ks_ptr, ps_ptr, counters_ptr, row, COUNT: tl.constexpr):
    """(the need of a guide, whether the row is in this phase, whether the list has all that it
    needs)."""
    if COUNT:
        top_k = tl.load(ks_ptr + row)
        need, active, listed = top_k.to(tl.float32), top_k > 0, False
    else:
        top_p = tl.load(ps_ptr + row)
        active = top_p < 1.0
        need = top_p * (tl.load(counters_ptr + row * 4 + 2).to(tl.float32) / MASS)
        listed = tl.load(counters_ptr + row * 4 + 3) <= MOST_LISTED
    return need, active, listed


@triton.jit
def _row_bottom(bottoms_ptr, nodes, NODES: tl.constexpr):
    block = tl.arange(0, NODES)
    return tl.min(tl.load(bottoms_ptr + block, mask=block < nodes, other=float("inf")), 0)


@triton.jit
def _exp(x, temperature, n):
    return tl.exp2(scaled(divided(x, temperature), n))


@triton.jit
def _append(list_ptr, first, inside, cols):
    """Write the columns that are `inside` to a row's list, from place `first` on."""
    if first < MOST_LISTED:
        place = first + tl.cumsum(inside, 0) - 1
        tl.store(list_ptr + place, cols, mask=(inside > 0) & (place < MOST_LISTED))


@triton.jit
def _list_kernel(
    x_ptr, temperature_ptr, roots_ptr, tops_ptr, cuts_ptr, cut_columns_ptr, ps_ptr, bounds_ptr,
    counters_ptr, list_ptr, stride_t, V, nodes, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """counters[row, 2:]: all masses, and the number of columns above the first value."""
    begin_overlapped(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(ps_ptr + row) < 1.0:
        start = tl.load(bounds_ptr + row * 4 + 1)
        cut, cut_column = tl.load(cuts_ptr + row), tl.load(cut_columns_ptr + row)
        if tl.load(tops_ptr + row * nodes + block) >= cut:
            cols = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf"))
            x = x.to(tl.float32)
            candidate = is_kept(x, cols, cut, cut_column) & (x > float("-inf"))
            e = _exp(x, tl.load(temperature_ptr + row), tl.load(roots_ptr + row * 2))
            at = counters_ptr + row * 4
            tl.atomic_add(at + 2, tl.sum(tl.where(candidate, (e * MASS).to(tl.int64), 0), 0))
            inside = (candidate & (x > start)).to(tl.int32)
            count = tl.sum(inside, 0)
            if count > 0:
                first = tl.atomic_add(at + 3, count.to(tl.int64))
                _append(list_ptr + row * MOST_LISTED, first, inside, cols)


@triton.jit
def _guide_kernel(
    x_ptr, temperature_ptr, roots_ptr, tops_ptr, bottoms_ptr, cuts_ptr, cut_columns_ptr, ks_ptr,
    ps_ptr, bounds_ptr, sums_ptr, counters_ptr, stride_t, T, V, nodes,
    BLOCK: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr, STAGE: tl.constexpr,
    COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """sums[row, block, i] of STAGE: the weights of the block's candidates above value i; for i = 0
    the number of all of them, or 0."""
    begin_overlapped(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    need, active, is_listed = _need(ks_ptr, ps_ptr, counters_ptr, row, COUNT)
    if active & (not is_listed):
        low, start, high, listed = _load_bounds(bounds_ptr + row * 4)
        here = row * nodes
        if STAGE == 1:
            bottom = _row_bottom(bottoms_ptr + here, nodes, NODES)
            low, start, high, listed = _narrowed(
                sums_ptr + here * SUMS, nodes, low, start, high, bottom, need, NODES, COUNT
            )
            if block == 0:
                _store_bounds(bounds_ptr + (T + row) * 4, low, start, high, listed)
        if listed > MOST_LISTED:
            at = sums_ptr + ((STAGE * T + row) * nodes + block) * SUMS
            cut, cut_column = tl.load(cuts_ptr + row), tl.load(cut_columns_ptr + row)
            top = tl.load(tops_ptr + here + block)
            wanted = top >= cut
            if not COUNT:
                wanted = wanted & (top > start)
            i = tl.arange(0, SUMS)
            sums = tl.zeros((SUMS,), tl.float32)
            if wanted:
                temperature, n = tl.load(temperature_ptr + row), tl.load(roots_ptr + row * 2)
                for first in range(0, BLOCK, WIDTH):
                    cols = block * BLOCK + first + tl.arange(0, WIDTH)
                    x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf"))
                    x = x.to(tl.float32)
                    candidate = is_kept(x, cols, cut, cut_column) & (x > float("-inf"))
                    w = candidate.to(tl.float32)
                    if COUNT:
                        sums += tl.where(i == 0, tl.sum(w, 0), 0.0)
                    else:
                        w = tl.where(candidate, _exp(x, temperature, n), 0.0)
                    for j in tl.static_range(1, 16):
                        above = x > _value(start, high, (j - 1) * 0.0625)
                        sums += tl.where(i == j, tl.sum(tl.where(above, w, 0.0), 0), 0.0)
            tl.store(at + i, sums)


@triton.jit
def _gather_kernel(
    x_ptr, temperature_ptr, roots_ptr, tops_ptr, bottoms_ptr, cuts_ptr, cut_columns_ptr, ks_ptr,
    ps_ptr, bounds_ptr, sums_ptr, counters_ptr, list_ptr, stride_t, T, V, nodes,
    BLOCK: tl.constexpr, NODES: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """counters[row, :2]: the number of columns between the bounds and the weights above them. If
    all columns above the lower bound fit the list, there is no upper bound."""
    begin_overlapped(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    need, active, is_listed = _need(ks_ptr, ps_ptr, counters_ptr, row, COUNT)
    if active & (not is_listed):
        low, start, high, listed = _load_bounds(bounds_ptr + (T + row) * 4)
        here = row * nodes
        if listed > MOST_LISTED:
            bottom = _row_bottom(bottoms_ptr + here, nodes, NODES)
            low, start, high, listed = _narrowed(
                sums_ptr + (T + row) * nodes * SUMS, nodes, low, start, high, bottom, need, NODES,
                COUNT,
            )  # fmt: skip
        if listed <= MOST_LISTED:
            high = float("inf")
        if block == 0:
            _store_bounds(bounds_ptr + (2 * T + row) * 4, low, start, high, listed)
        cut, cut_column = tl.load(cuts_ptr + row), tl.load(cut_columns_ptr + row)
        top = tl.load(tops_ptr + here + block)
        if (top >= cut) & (top > low):
            cols = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_t + cols, mask=cols < V, other=float("-inf"))
            x = x.to(tl.float32)
            candidate = is_kept(x, cols, cut, cut_column) & (x > float("-inf"))
            w = candidate.to(tl.int64)
            if not COUNT:
                e = _exp(x, tl.load(temperature_ptr + row), tl.load(roots_ptr + row * 2))
                w = tl.where(candidate, (e * MASS).to(tl.int64), 0)
            at = counters_ptr + row * 4
            tl.atomic_add(at + 1, tl.sum(tl.where(x > high, w, 0), 0))
            inside = (candidate & (x > low) & (x <= high)).to(tl.int32)
            count = tl.sum(inside, 0)
            if count > 0:
                first = tl.atomic_add(at, count.to(tl.int64))
                _append(list_ptr + row * MOST_LISTED, first, inside, cols)


@triton.jit
def _ordered(x, column):
    """An integer from 0 that is larger for an earlier column in the order of `sample`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 is 0
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2147483648
    return (bits << COLUMN_BITS) | (column ^ LAST_COLUMN).to(tl.int64)


@triton.jit
def _logit_of(ordered):
    bits = ((ordered >> COLUMN_BITS) - 2147483648).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _items(x_ptr, list_ptr, i, length, listed, low, high, temperature, n, COUNT: tl.constexpr):
    """(order, weight) of columns of the list, or of the row, between the bounds."""
    known, from_list = i < length, i < tl.where(listed, length, 0)
    column = tl.where(from_list, tl.load(list_ptr + i, mask=from_list, other=0), i)
    x = tl.load(x_ptr + column, mask=known, other=float("-inf")).to(tl.float32)
    w = tl.full(x.shape, 1, tl.int64)
    if not COUNT:
        w = (_exp(x, temperature, n) * MASS).to(tl.int64)
    return _ordered(x, column), tl.where(known & (x > low) & (x <= high), w, 0)


@triton.jit
def _search(
    x_ptr, list_ptr, length, listed, low, high, least, need, temperature, n,
    COUNT: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest order at which the weights of this order and above, of those from `least` on,
    reach the need. The last bits of a logit of 16 bits follow from its sign, and the first bits of
    a column of COLUMNS digits are known."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    KNOWN: tl.constexpr = 4 if dtype == tl.bfloat16 else (3 if dtype == tl.float16 else 0)
    found = tl.full((), 0, tl.int64)
    digit = tl.arange(0, 16)
    for step in range(DIGITS - KNOWN - (DIGITS - LOGIT_DIGITS - COLUMNS)):
        level = step
        if step == LOGIT_DIGITS - KNOWN:
            ones: tl.constexpr = ((1 << (4 * KNOWN)) - 1) * 16777216
            found += tl.where(found < 36028797018963968, ones, 0)  # 2**55: of logits from 0 on
            found += 16777216 - (1 << (4 * COLUMNS))
        if step >= LOGIT_DIGITS - KNOWN:
            level = step + DIGITS - LOGIT_DIGITS - COLUMNS + KNOWN
        shift = (DIGITS - 1 - level) * 4
        sums = tl.zeros((16,), tl.int64)
        for first in range(0, length, STEP):
            i = first + tl.arange(0, STEP)
            order, w = _items(x_ptr, list_ptr, i, length, listed, low, high, temperature, n, COUNT)
            w = tl.where(order >= least, w, 0)
            above = (order >> shift)[:, None] >= ((found >> shift) + digit)[None, :]
            sums += tl.sum(tl.where(above, w[:, None], 0), 0)
        best = tl.sum((sums >= need).to(tl.int32), 0) - 1
        found += best.to(tl.int64) << shift
    return found


@triton.jit
def _listed_mass(
    x_ptr, list_ptr, length, listed, low, high, least, temperature, n, STEP: tl.constexpr
):  # fmt: skip
    """The masses of the items from the order `least` on."""
    total = tl.full((), 0, tl.int64)
    for first in range(0, length, STEP):
        i = first + tl.arange(0, STEP)
        order, w = _items(x_ptr, list_ptr, i, length, listed, low, high, temperature, n, False)
        total += tl.sum(tl.where(order >= least, w, 0), 0)
    return total


@triton.jit
def _mass_needed(top_p, total):
    need = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(need, 1)


@triton.jit
def _decide_kernel(
    x_ptr, temperature_ptr, roots_ptr, cuts_ptr, cut_columns_ptr, ks_ptr, ps_ptr, bounds_ptr,
    counters_ptr, list_ptr, stride_t, T, V, COUNT: tl.constexpr, STEP: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The cut of a phase. If the list has all columns that top_k lets through, also that of
    top_p."""
    begin_overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    top_k, active, is_listed = _need(ks_ptr, ps_ptr, counters_ptr, row, COUNT)
    if active:
        low, _, high, _ = _load_bounds(bounds_ptr + (2 * T + row) * 4)
        count = tl.load(counters_ptr + row * 4)
        above = tl.load(counters_ptr + row * 4 + 1)
        if is_listed:
            low, high = tl.load(bounds_ptr + row * 4 + 1), float("inf")
            count = tl.load(counters_ptr + row * 4 + 3)
        listed = count <= MOST_LISTED
        length = tl.where(listed, count, V).to(tl.int32)
        cut, cut_column = tl.load(cuts_ptr + row), tl.load(cut_columns_ptr + row)
        least = _ordered(cut, cut_column)
        temperature, n = tl.load(temperature_ptr + row), tl.load(roots_ptr + row * 2)
        x_row, list_row = x_ptr + row * stride_t, list_ptr + row * MOST_LISTED
        top_p = tl.load(ps_ptr + row)
        if COUNT:
            need = top_k.to(tl.int64) - above
            reached = need <= count
        else:
            need = _mass_needed(top_p, tl.load(counters_ptr + row * 4 + 2)) - above
            reached = True
            if is_listed:  # noqa: SIM102 (these are not constants)
                if need > _listed_mass(
                    x_row, list_row, length, listed, low, high, least, temperature, n, STEP
                ):  # columns at the first value are needed too, as where all logits are equal
                    listed, length, low = False, V, float("-inf")
        if reached:
            least = _search(
                x_row, list_row, length, listed, low, high, least, need, temperature, n, COUNT,
                STEP, COLUMNS,
            )  # fmt: skip
        if COUNT:  # noqa: SIM102 (a constant)
            if (top_p < 1.0) & listed & (above == 0):
                total = _listed_mass(
                    x_row, list_row, length, listed, low, high, least, temperature, n, STEP
                )
                need = _mass_needed(top_p, total)
                if need <= total:
                    least = _search(
                        x_row, list_row, length, listed, low, high, least, need, temperature, n,
                        False, STEP, COLUMNS,
                    )  # fmt: skip
                tl.store(ps_ptr + row, 1.0)
        tl.store(cuts_ptr + row, _logit_of(least))
        tl.store(cut_columns_ptr + row, (least & LAST_COLUMN).to(tl.int32) ^ LAST_COLUMN)
