"""The Triton kernels of the gated delta rule's gradient; the formulas are those of `gradient.py`.

With the inverse T of I + A, a chunk's u and dr are linear in the state at its beginning and in the
gradient dS of the state after it:

    u = T beta v - (T beta exp(G) k) S'        dr = (P T)^T do + (T^T l k) dS

So all chunks run at once, but in the kernel that carries S from the first chunk and dS from the
last one, with few products a chunk. Products are those of tensor cores, of operands in the dtype of
the rows, added up in fp32; S and dS stay in fp32. u and S are computed again, in this order, which
is not that of the forward.

N = chunks of all sequences   Hk, Hv = heads   C = CHUNK   D = features of q and k, a power of two
E = features of v; EP = E with padding
inverse [N, Hv, C, C]: T^T   readers, solved [N, Hv, C, D]: T beta exp(G) k and T^T l k
updates, grads [N, Hv, C, EP]: T beta v, then u; (P T)^T do, then dr
starts, ends [N, Hv, D, EP]: S' and dS, rounded
inside [N, Hv, 2, C]: parts of dg and dbeta
"""

import triton
import triton.language as tl

from rlk_kernels.ops.delta_rule.steps import BLOCK, find_chunk


@triton.jit
def _product(a, b, c=None):
    """a @ b + c; of fp32 by three products of tf32 numbers: nearly fp32, on tensor cores."""
    return tl.dot(a, b, c, input_precision="tf32x3")


@triton.jit
def _rows_of(cu_ptr, chunk, B, C: tl.constexpr):
    """(the first row of `chunk`, the row after the last of its sequence); none of another chunk."""
    b, number = find_chunk(cu_ptr, chunk, B, C, 1)
    begin = tl.load(cu_ptr + b)
    first = begin + number * C
    return first, tl.where(number >= 0, tl.load(cu_ptr + b + 1), first)


@triton.jit(do_not_specialize=["B"])
def inverse_kernel(below_ptr, inverse_ptr, cu_ptr, B, HV: tl.constexpr, C: tl.constexpr):
    """T^T of a chunk of a value head, of below = A^T: by rows from the last in blocks on the
    diagonal, then block after block of a column."""
    chunk = tl.program_id(0)
    first, end = _rows_of(cu_ptr, chunk, B, C)
    if first < end:
        at = (chunk.to(tl.int64) * HV + tl.program_id(1)) * C * C
        i = tl.arange(0, BLOCK)
        row, column = i[:, None], i[None, :]
        dtype = inverse_ptr.dtype.element_ty
        diagonal = ()
        for block in tl.static_range(C // BLOCK):
            here = below_ptr + at + block * BLOCK * (C + 1)
            inverse = tl.where(row == column, 1.0, 0.0)
            for back in tl.static_range(1, BLOCK):
                factors = tl.load(here + (BLOCK - 1 - back) * C + i)
                later = tl.sum(factors[:, None] * inverse, 0)
                inverse = tl.where(row == BLOCK - 1 - back, inverse - later[None, :], inverse)
            diagonal = diagonal + (inverse,)  # noqa: RUF005 (Triton has no other way)
        for right in tl.static_range(C // BLOCK):
            under = (diagonal[right],)
            for back in tl.static_range(right + 1):
                upper = at + (right - back) * BLOCK * C + row * C + column
                if back > 0:
                    total = tl.zeros((BLOCK, BLOCK), tl.float32)
                    for k in tl.static_range(back):
                        factors = tl.load(below_ptr + upper + (right - k) * BLOCK)
                        total = _product(factors, under[k], total)
                    total = 0.0 - _product(diagonal[right - back], total)
                    under = under + (total,)  # noqa: RUF005
                tl.store(inverse_ptr + upper + right * BLOCK, under[back].to(dtype))
            for down in tl.static_range(right + 1, C // BLOCK):
                lower = inverse_ptr + at + down * BLOCK * C + right * BLOCK
                tl.store(lower + row * C + column, tl.zeros((BLOCK, BLOCK), dtype))


@triton.jit(do_not_specialize=["B"])
def solved_kernel(
    queries_ptr, keys_ptr, v_ptr, beta_ptr, do_ptr, inverse_ptr, sums_ptr, readers_ptr, solved_ptr,
    updates_ptr, grads_ptr, cu_ptr, B,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The parts of u and dr of a chunk of a value head that do not depend on other chunks, and the
    factors of those that do."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    first, end = _rows_of(cu_ptr, chunk, B, C)
    if first < end:
        j = tl.arange(0, C)
        row, column = j[:, None], j[None, :]
        t = (first + j).to(tl.int64)
        live = first + j < end
        head = chunk.to(tl.int64) * HV + h
        at_k = ((chunk.to(tl.int64) * HK + h // (HV // HK)) * C + row) * D
        dtype = queries_ptr.dtype.element_ty
        beta = tl.load(beta_ptr + t * HV + h, mask=live, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + head * C + j)
        last = tl.load(sums_ptr + head * C + C - 1)
        inverse_t = tl.load(inverse_ptr + head * C * C + row * C + column)
        inverse = tl.trans(inverse_t)
        reads = (beta * tl.exp(sums))[:, None]
        later = tl.exp(last - sums)[:, None]
        qk = tl.zeros((C, C), tl.float32)
        for part in range(D // BD):
            d = part * BD + tl.arange(0, BD)[None, :]
            q = tl.load(queries_ptr + at_k + d)
            k = tl.load(keys_ptr + at_k + d)
            qk = _product(q, tl.trans(k), qk)
            k = k.to(tl.float32)
            at = (head * C + row) * D + d
            tl.store(readers_ptr + at, _product(inverse, (reads * k).to(dtype)).to(dtype))
            tl.store(solved_ptr + at, _product(inverse_t, (later * k).to(dtype)).to(dtype))
        decay = tl.exp(tl.where(column <= row, sums[:, None] - sums[None, :], 0.0))
        weights = tl.where(column <= row, decay * qk, 0.0).to(dtype)
        outer = _product(inverse_t, tl.trans(weights)).to(dtype)
        for part in range(EP // BE):
            e = part * BE + tl.arange(0, BE)[None, :]
            at_e = (t[:, None] * HV + h) * E + e
            live_e = live[:, None] & (e < E)
            v = tl.load(v_ptr + at_e, mask=live_e, other=0.0).to(tl.float32)
            do = tl.load(do_ptr + at_e, mask=live_e, other=0.0)
            at = (head * C + row) * EP + e
            v = (beta[:, None] * v).to(dtype)
            tl.store(updates_ptr + at, _product(inverse, v).to(dtype))
            tl.store(grads_ptr + at, _product(outer, do).to(dtype))


@triton.jit
def _carry_state(
    keys_ptr, readers_ptr, sums_ptr, updates_ptr, starts_ptr, b, h, e, begin, end,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, EP: tl.constexpr,
    BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """S' and u, from the first chunk to the last."""
    d = tl.arange(0, D)
    j = tl.arange(0, C)
    dtype = keys_ptr.dtype.element_ty
    state = tl.zeros((D, BE), tl.float32)
    for number in range(tl.cdiv(end - begin, C)):
        chunk = (begin // C + b + number).to(tl.int64)
        head = chunk * HV + h
        at_k = ((chunk * HK + h // (HV // HK)) * C + j[:, None]) * D + d[None, :]
        at_e = (head * C + j[:, None]) * EP + e
        k = tl.load(keys_ptr + at_k)
        readers = tl.load(readers_ptr + (head * C + j[:, None]) * D + d[None, :])
        u = tl.load(updates_ptr + at_e).to(tl.float32)
        sums = tl.load(sums_ptr + head * C + j)
        last = tl.load(sums_ptr + head * C + C - 1)
        read = state.to(dtype)
        tl.store(starts_ptr + (head * D + d[:, None]) * EP + e, read)
        u = u - _product(readers, read)
        tl.store(updates_ptr + at_e, u.to(dtype))
        late = (u * tl.exp(last - sums)[:, None]).to(dtype)
        state = _product(tl.trans(k), late, tl.exp(last) * state)


@triton.jit
def _carry_gradient(
    queries_ptr, keys_ptr, beta_ptr, do_ptr, solved_ptr, sums_ptr, grads_ptr, ends_ptr, b, h, e,
    begin, end,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dS and dr, from the last chunk to the first."""
    d = tl.arange(0, D)
    j = tl.arange(0, C)
    dtype = keys_ptr.dtype.element_ty
    ds = tl.zeros((D, BE), tl.float32)
    count = tl.cdiv(end - begin, C)
    for step in range(count):
        number = count - 1 - step
        chunk = (begin // C + b + number).to(tl.int64)
        head = chunk * HV + h
        first = begin + number * C
        live = first + j < end
        t = (first + j).to(tl.int64) * HV + h
        at_k = ((chunk * HK + h // (HV // HK)) * C + j[:, None]) * D + d[None, :]
        at_e = (head * C + j[:, None]) * EP + e
        q = tl.load(queries_ptr + at_k)
        k = tl.load(keys_ptr + at_k)
        do = tl.load(do_ptr + t[:, None] * E + e, mask=live[:, None] & (e < E), other=0.0)
        solved = tl.load(solved_ptr + (head * C + j[:, None]) * D + d[None, :])
        dr = tl.load(grads_ptr + at_e).to(tl.float32)
        beta = tl.load(beta_ptr + t, mask=live, other=0.0).to(tl.float32)
        here = tl.exp(tl.load(sums_ptr + head * C + j))
        last = tl.load(sums_ptr + head * C + C - 1)
        read = ds.to(dtype)
        tl.store(ends_ptr + (head * D + d[:, None]) * EP + e, read)
        ds = _product(tl.trans(q), (here[:, None] * do.to(tl.float32)).to(dtype), tl.exp(last) * ds)
        dr = _product(solved, read, dr)
        tl.store(grads_ptr + at_e, dr.to(dtype))
        back = (0.0 - here * beta)[:, None] * dr
        ds = _product(tl.trans(k), back.to(dtype), ds)


@triton.jit
def carry_kernel(
    queries_ptr, keys_ptr, beta_ptr, do_ptr, sums_ptr, readers_ptr, solved_ptr, updates_ptr,
    grads_ptr, starts_ptr, ends_ptr, cu_ptr,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """BE features of a value head of a sequence, chunk after chunk: half of the programs carry the
    state, and the other half, which run beside them, its gradient."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    e = (tl.program_id(2) % (EP // BE) * BE + tl.arange(0, BE))[None, :]
    if tl.program_id(2) < EP // BE:
        _carry_state(
            keys_ptr, readers_ptr, sums_ptr, updates_ptr, starts_ptr, b, h, e, begin, end, HK, HV,
            D, EP, BE, C,
        )  # fmt: skip
    else:
        _carry_gradient(
            queries_ptr, keys_ptr, beta_ptr, do_ptr, solved_ptr, sums_ptr, grads_ptr, ends_ptr, b,
            h, e, begin, end, HK, HV, D, E, EP, BE, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def pairs_kernel(
    queries_ptr, keys_ptr, v_ptr, beta_ptr, do_ptr, sums_ptr, updates_ptr, grads_ptr, dqk_ptr,
    dkk_ptr, dv_ptr, inside_ptr, cu_ptr, B,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dv, the gradients of q k and k k of a chunk's pairs of rows, and the parts of dg and dbeta
    that come from within the chunk."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    first, end = _rows_of(cu_ptr, chunk, B, C)
    if first < end:
        j = tl.arange(0, C)
        row, column = j[:, None], j[None, :]
        t = (first + j).to(tl.int64) * HV + h
        live = first + j < end
        head = chunk.to(tl.int64) * HV + h
        at_k = ((chunk.to(tl.int64) * HK + h // (HV // HK)) * C + row) * D
        pair = head * C * C + row * C + column
        dtype = queries_ptr.dtype.element_ty
        beta = tl.load(beta_ptr + t, mask=live, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + head * C + j)
        d_qk = tl.zeros((C, C), tl.float32)
        d_kk = tl.zeros((C, C), tl.float32)
        dbeta = tl.zeros((C,), tl.float32)
        for part in range(EP // BE):
            e = part * BE + tl.arange(0, BE)[None, :]
            at_e = t[:, None] * E + e
            live_e = live[:, None] & (e < E)
            u_t = tl.trans(tl.load(updates_ptr + (head * C + row) * EP + e))
            do = tl.load(do_ptr + at_e, mask=live_e, other=0.0)
            dr = tl.load(grads_ptr + (head * C + row) * EP + e)
            d_qk = _product(do, u_t, d_qk)
            d_kk = _product(dr, u_t, d_kk)
            dr = dr.to(tl.float32)
            v = tl.load(v_ptr + at_e, mask=live_e, other=0.0).to(tl.float32)
            dbeta += tl.sum(dr * v, 1)
            dv = (beta[:, None] * dr).to(dv_ptr.dtype.element_ty)
            tl.store(dv_ptr + at_e, dv, mask=live_e)
        decay = tl.exp(tl.where(column <= row, sums[:, None] - sums[None, :], 0.0))
        d_qk = tl.where(column <= row, d_qk * decay, 0.0)
        d_kk = tl.where(column < row, 0.0 - d_kk * decay, 0.0)
        tl.store(dqk_ptr + pair, d_qk.to(dtype))
        tl.store(dkk_ptr + pair, (beta[:, None] * d_kk).to(dtype))
        qk = tl.zeros((C, C), tl.float32)
        kk = tl.zeros((C, C), tl.float32)
        for part in range(D // BD):
            d = part * BD + tl.arange(0, BD)[None, :]
            q = tl.load(queries_ptr + at_k + d)
            k = tl.load(keys_ptr + at_k + d)
            k_t = tl.trans(k)
            qk = _product(q, k_t, qk)
            kk = _product(k, k_t, kk)
        kk = d_kk * kk
        both = d_qk * qk + beta[:, None] * kk
        at = inside_ptr + head * 2 * C + j
        tl.store(at, tl.sum(both, 1) - tl.sum(both, 0))
        tl.store(at + C, dbeta + tl.sum(kk, 1))


@triton.jit(do_not_specialize=["B"])
def rows_kernel(
    queries_ptr, keys_ptr, beta_ptr, do_ptr, sums_ptr, updates_ptr, grads_ptr, starts_ptr, ends_ptr,
    dqk_ptr, dkk_ptr, inside_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, cu_ptr, B,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq and dk [T, Hv, D] of a chunk's normed rows, for each value head; dg and dbeta."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    first, end = _rows_of(cu_ptr, chunk, B, C)
    if first < end:
        j = tl.arange(0, C)
        row, column = j[:, None], j[None, :]
        t = (first + j).to(tl.int64) * HV + h
        live = first + j < end
        head = chunk.to(tl.int64) * HV + h
        at_k = ((chunk.to(tl.int64) * HK + h // (HV // HK)) * C + row) * D
        pair = head * C * C + row * C + column
        beta = tl.load(beta_ptr + t, mask=live, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + head * C + j)
        last = tl.load(sums_ptr + head * C + C - 1)
        here = tl.exp(sums)
        later = tl.exp(last - sums)
        d_qk = tl.load(dqk_ptr + pair)
        d_kk = tl.load(dkk_ptr + pair)
        dg = tl.load(inside_ptr + head * 2 * C + j)
        dbeta = tl.load(inside_ptr + head * 2 * C + C + j)
        moves = tl.zeros((C,), tl.float32)
        along = 0.0
        for part in range(D // BD):
            d = part * BD + tl.arange(0, BD)
            q = tl.load(queries_ptr + at_k + d[None, :])
            k = tl.load(keys_ptr + at_k + d[None, :])
            mask = live[:, None]
            at = t[:, None] * D + d[None, :]
            do_state = tl.zeros((C, BD), tl.float32)
            dr_state = tl.zeros((C, BD), tl.float32)
            for inner in range(EP // BE):
                e = inner * BE + tl.arange(0, BE)[None, :]
                live_e = live[:, None] & (e < E)
                do = tl.load(do_ptr + t[:, None] * E + e, mask=live_e, other=0.0)
                dr = tl.load(grads_ptr + (head * C + row) * EP + e)
                state_t = tl.trans(tl.load(starts_ptr + (head * D + d[:, None]) * EP + e))
                do_state = _product(do, state_t, do_state)
                dr_state = _product(dr, state_t, dr_state)
            k_state = tl.sum(k.to(tl.float32) * dr_state, 1)
            dbeta -= here * k_state
            dg += here * (tl.sum(q.to(tl.float32) * do_state, 1) - beta * k_state)
            dq = _product(d_qk, k, here[:, None] * do_state)
            tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=mask)
            dk = (0.0 - here * beta)[:, None] * dr_state
            dk = _product(tl.trans(d_qk), q, dk)
            dk = _product(d_kk, k, dk)
            dk = _product(tl.trans(d_kk), k, dk)
            u_ds = tl.zeros((C, BD), tl.float32)
            for inner in range(EP // BE):
                e = inner * BE + tl.arange(0, BE)[None, :]
                at_s = (head * D + d[:, None]) * EP + e
                u = tl.load(updates_ptr + (head * C + row) * EP + e)
                ds = tl.load(ends_ptr + at_s)
                u_ds = _product(u, tl.trans(ds), u_ds)
                state = tl.load(starts_ptr + at_s).to(tl.float32)
                along += tl.sum(tl.sum(state * ds.to(tl.float32), 1), 0)
            moves += later * tl.sum(k.to(tl.float32) * u_ds, 1)
            dk += later[:, None] * u_ds
            tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        dg = dg - moves
        dg = tl.where(j == C - 1, dg + tl.sum(moves, 0) + tl.exp(last) * along, dg)
        dg = tl.sum(tl.where(column >= row, dg[None, :], 0.0), 1)
        tl.store(dg_ptr + t, dg, mask=live)
        tl.store(dbeta_ptr + t, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["ROWS", "B"])
def norm_backward_kernel(
    x_ptr, d_ptr, dx_ptr, cu_ptr, scale, eps, ROWS, B,
    HK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS of the ROWS heads of rows of q or k: the gradients of a head's GROUP value heads,
    one by one, through the norm; zeros for rows outside every sequence."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    written = row < ROWS
    t = row // HK
    mask = written & (t >= tl.load(cu_ptr)) & (t < tl.load(cu_ptr + B))
    total = tl.zeros((BLOCK_ROWS, D), tl.float32)
    for one in tl.static_range(GROUP):
        at = (row * GROUP + one) * D + column
        total += tl.load(d_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total = total * scale
    x = tl.load(x_ptr + row * D + column, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
    along = tl.sum(total * x, 1)[:, None]
    dx = inverse * total - inverse * inverse * inverse * x * along
    tl.store(dx_ptr + row * D + column, dx.to(dx_ptr.dtype.element_ty), mask=written)
