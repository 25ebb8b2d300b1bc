"""The Triton kernels of the gated delta rule's gradient; the formulas are those of `gradient.py`.

A program has a block of features of a value head of one sequence, and goes through its chunks from
the last one. The forward has left q, k, u and G of each chunk and the state at its beginning
(`kernels.py`). Given k, columns of the state do not depend on one another, so the other gradients
are sums over the blocks.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.delta_rule.steps import sum_columns


@triton.jit
def _multiply(a, b):
    """a @ b, by three products of tf32 numbers: nearly fp32, on tensor cores."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, do_ptr, starts_ptr, u_ptr, sums_ptr, cu_ptr, dq_ptr, dk_ptr,
    dv_ptr, dg_ptr, dbeta_ptr,
    T, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq and dk [blocks, T, HV, D] in fp32: of the normed rows, for each value head; dg and dbeta
    [blocks, T, HV]."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    block = tl.program_id(2)
    hk = h // (HV // HK)
    dtype = q_ptr.dtype.element_ty
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    d = tl.arange(0, DP)
    e = block * BE + tl.arange(0, BE)
    before = block.to(tl.int64) * T  # rows of the blocks before
    j = tl.arange(0, C)
    row, column = j[:, None], j[None, :]
    ds = tl.zeros((DP, BE), tl.float32)
    count = tl.cdiv(end - begin, C)
    for step in range(count):
        number = count - 1 - step
        first = begin + number * C
        t = (first + j).to(tl.int64)
        live = first + j < end
        live_d = live[:, None] & (d < D)[None, :]
        live_e = live[:, None] & (e < E)[None, :]
        chunk = (begin // C + b + number).to(tl.int64)
        head = chunk * HV + h
        at_k = ((chunk * HK + hk) * C + row) * D + d[None, :]
        at_h = (before + t) * HV + h
        at_d = at_h[:, None] * D + d[None, :]
        at_e = (t[:, None] * HV + h) * E + e[None, :]
        at_u = (head * C + row) * E + e[None, :]
        q = tl.load(q_ptr + at_k, mask=live_d, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at_k, mask=live_d, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at_e, mask=live_e, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + at_u, mask=live_e, other=0.0).to(tl.float32)
        do = tl.load(do_ptr + at_e, mask=live_e, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + t * HV + h, mask=live, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + head * C + j)
        last = tl.minimum(end - first, C) - 1
        total = tl.load(sums_ptr + head * C + C - 1)
        starts_at = starts_ptr + (head * E + e[None, :]) * D + d[:, None]
        state = tl.load(starts_at, mask=(d < D)[:, None] & (e < E)[None, :], other=0.0)
        state = state.to(tl.float32)

        here = tl.exp(sums)
        later = tl.exp(total - sums)
        decay = tl.exp(tl.where(column <= row, sums[:, None] - sums[None, :], 0.0))
        decay = tl.where(column <= row, decay, 0.0)
        k_t = tl.trans(k)
        kk = tl.where(column < row, _multiply(k, k_t), 0.0)
        below = kk * decay * beta[:, None]
        weights = (_multiply(q, k_t) * decay).to(dtype).to(tl.float32)

        dr = _multiply(tl.trans(weights), do) + later[:, None] * _multiply(k, ds)
        for back in range(C - 1):
            i = C - 1 - back
            mine = tl.sum(tl.where(row == i, dr, 0.0), 0)
            factors = tl.sum(tl.where(row == i, below, 0.0), 0)
            dr = dr - factors[:, None] * mine[None, :]
        u_t = tl.trans(u)
        d_below = tl.where(column < row, 0.0 - _multiply(dr, u_t), 0.0)
        d_weights = tl.where(column <= row, _multiply(do, u_t), 0.0)
        dx = dr * beta[:, None]
        state_t = tl.trans(state)
        d_qk = d_weights * decay
        d_kk = d_below * decay * beta[:, None]
        dq = _multiply(d_qk, k) + here[:, None] * _multiply(do, state_t)
        tl.store(dq_ptr + at_d, dq, mask=live_d)
        u_ds = _multiply(u, tl.trans(ds))
        dk = _multiply(tl.trans(d_qk), q) + _multiply(d_kk, k) + _multiply(tl.trans(d_kk), k)
        dk = dk - here[:, None] * _multiply(dx, state_t) + later[:, None] * u_ds
        tl.store(dk_ptr + at_d, dk, mask=live_d)
        tl.store(dv_ptr + at_e, dx.to(dv_ptr.dtype.element_ty), mask=live_e)
        k_state = _multiply(k, state)
        dbeta = tl.sum(d_below * kk * decay, 1) + tl.sum(dr * (v - here[:, None] * k_state), 1)
        tl.store(dbeta_ptr + at_h, dbeta, mask=live)
        both = d_weights * weights + d_below * below
        reads = tl.sum(do * _multiply(q, state), 1) - tl.sum(dx * k_state, 1)
        moves = later * tl.sum(k * u_ds, 1)
        dg = tl.sum(both, 1) - tl.sum(both, 0) + here * reads - moves
        ends = tl.sum(moves, 0) + tl.exp(total) * tl.sum(tl.sum(ds * state, 1), 0)
        dg = tl.where(j == last, dg + ends, dg)
        dg = tl.sum(tl.where(column >= row, dg[None, :], 0.0), 1)
        tl.store(dg_ptr + at_h, dg, mask=live)
        ds = tl.exp(total) * ds + _multiply(tl.trans(here[:, None] * q), do)
        ds = ds - _multiply(tl.trans(here[:, None] * k), dx)


@triton.jit(do_not_specialize=["ROWS"])
def norm_backward_kernel(
    x_ptr, d_ptr, dx_ptr, scale, eps, ROWS,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    D_LEVELS: tl.constexpr,
):  # fmt: skip
    """A row of a head of q or k, one of ROWS: the gradients of its GROUP value heads, block after
    block, one by one, through the norm."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, DP)
    has = cols < D
    total = tl.zeros((DP,), tl.float32)
    for block in tl.static_range(BLOCKS):
        for one in tl.static_range(GROUP):
            at = ((block * ROWS.to(tl.int64) + row) * GROUP + one) * D
            total += tl.load(d_ptr + at + cols, mask=has, other=0.0)
    x = tl.load(x_ptr + row * D + cols, mask=has, other=0.0).to(tl.float32)
    x = tl.reshape(x, (1, DP))
    total = tl.reshape(total * scale, (1, DP))
    inverse = tl.rsqrt(sum_columns(x * x, 1, DP, D_LEVELS) + eps)[:, None]
    along = sum_columns(total * x, 1, DP, D_LEVELS)[:, None]
    dx = inverse * total - inverse * inverse * inverse * x * along
    tl.store(dx_ptr + row * D + cols, tl.reshape(dx, (DP,)).to(dx_ptr.dtype.element_ty), mask=has)
