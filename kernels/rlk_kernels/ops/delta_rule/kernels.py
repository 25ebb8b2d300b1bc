"""The Triton kernels of the gated delta rule's forward for many rows; `decode_kernels.py` has the
one for a row of each sequence. `operator.py` describes the order of a row's sums.

Four kernels run one after another: q and k of each chunk (`prepare_kernel`), the factors of u
(`below_kernel`), u and the states from chunk to chunk (`states_kernel`), and out (`out_kernel`).
All but the third run all chunks at once. What one leaves for the next lies by chunk, not by row: a
chunk of a sequence that continues also has the rows that its slot holds, and rows that it does not
have yet are zeros.

N = chunks of all sequences   Hk, Hv = heads   C = CHUNK   D = features of q and k   E = features of
v   keys, queries [N, Hk, C, D]   sums [N, Hv, C]: G   below [N, Hv, C, C], transposed   starts [N,
Hv, E, D]: S', transposed   u [N, Hv, C, E]
"""

import triton
import triton.language as tl

from rlk_kernels.ops.delta_rule.steps import (
    BLOCK,
    find_chunk,
    find_rows,
    normed,
    part_of,
    solve_block,
)


@triton.jit(do_not_specialize=["N", "B"])
def prepare_kernel(
    q_ptr, k_ptr, queries_ptr, keys_ptr, kept_ptr, stride_kept, slots_ptr, context_ptr, cu_ptr, N,
    B, scale, eps,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    SPARE: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """The normed q and k of a chunk of a head, and the k that a slot holds."""
    chunk = tl.program_id(0)
    hk = tl.program_id(1)
    b, number = find_chunk(cu_ptr, chunk, B, C, SPARE)
    begin, end, context, slot = find_rows(b, cu_ptr, slots_ptr, context_ptr, N, CACHED)
    first = begin - context % C + number * C
    if (number >= 0) & (first < end) & (begin < end):
        row = tl.arange(0, C)
        d = tl.arange(0, DP)
        t = first + row
        live = ((t >= begin) & (t < end))[:, None] & (d < D)[None, :]
        at = (t.to(tl.int64)[:, None] * HK + hk) * D + d[None, :]
        q = tl.load(q_ptr + at, mask=live, other=0.0)
        k = tl.load(k_ptr + at, mask=live, other=0.0)
        q = tl.where(live, normed(q, scale, eps, C, DP, LEVELS), 0.0).to(q.dtype)
        k = tl.where(live, normed(k, 1.0, eps, C, DP, LEVELS), 0.0).to(k.dtype)
        if CACHED:
            held = (t < begin)[:, None] & (d < D)[None, :]
            old = kept_ptr + slot * stride_kept + (row[:, None] * HK + hk) * D + d[None, :]
            k = tl.where(held, tl.load(old, mask=held, other=0.0), k)
        at = ((chunk.to(tl.int64) * HK + hk) * C + row[:, None]) * D + d[None, :]
        tl.store(queries_ptr + at, q, mask=(d < D)[None, :])
        tl.store(keys_ptr + at, k, mask=(d < D)[None, :])


@triton.jit(do_not_specialize=["N", "B"])
def below_kernel(
    keys_ptr, g_ptr, beta_ptr, below_ptr, sums_ptr, decays_ptr, stride_decays, slots_ptr,
    context_ptr, cu_ptr, N, B,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr,
    SPARE: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """G of a chunk of a value head, row by row, and below[j, i] = beta_i exp(G_i - G_j) k_i k_j for
    j < i, zeros for other j and for rows that a slot holds."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    hk = h // (HV // HK)
    b, number = find_chunk(cu_ptr, chunk, B, C, SPARE)
    begin, end, context, slot = find_rows(b, cu_ptr, slots_ptr, context_ptr, N, CACHED)
    first = begin - context % C + number * C
    if (number >= 0) & (first < end) & (begin < end):
        row = tl.arange(0, C)
        d = tl.arange(0, DP)
        t = first + row
        total = 0.0
        sums = tl.zeros((C,), tl.float32)
        if CACHED:
            old = decays_ptr + slot * stride_decays + h
            sums = tl.load(old + row * HV, mask=t < begin, other=0.0)
            total = tl.load(old + (begin - first - 1) * HV, mask=first < begin, other=0.0)
        for i in tl.static_range(C):
            live = (first + i >= begin) & (first + i < end)
            at = (first + i).to(tl.int64) * HV + h
            total = total + tl.load(g_ptr + at, mask=live, other=0.0)
            sums = tl.where((row == i) & (t >= begin), total, sums)
        head = chunk.to(tl.int64) * HV + h
        tl.store(sums_ptr + head * C + row, sums)
        is_new = (t >= begin) & (t < end)
        beta = tl.load(beta_ptr + t.to(tl.int64) * HV + h, mask=is_new, other=0.0).to(tl.float32)
        at = ((chunk.to(tl.int64) * HK + hk) * C + row[:, None]) * D + d[None, :]
        k = tl.load(keys_ptr + at, mask=(d < D)[None, :], other=0.0)
        kk = tl.dot(k, tl.trans(k), input_precision="ieee")
        earlier = row[:, None] < row[None, :]
        decay = tl.exp(tl.where(earlier, sums[None, :] - sums[:, None], 0.0))
        below = tl.where(earlier & is_new[None, :], decay * kk * beta[None, :], 0.0)
        tl.store(below_ptr + (head * C + row[:, None]) * C + row[None, :], below)


@triton.jit(do_not_specialize=["N"])
def states_kernel(
    keys_ptr, v_ptr, beta_ptr, below_ptr, sums_ptr, starts_ptr, u_ptr, state_ptr, updates_ptr,
    stride_state, stride_updates, slots_ptr, context_ptr, cu_ptr, N,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    BE: tl.constexpr, C: tl.constexpr, SPARE: tl.constexpr, PARTS: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    """BE features of a value head of a sequence, chunk after chunk. The state lies transposed, so
    that the results of its products are operands of the next ones."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    h = tl.program_id(0) // BLOCKS % HV
    b = tl.program_id(0) // (BLOCKS * HV)
    hk = h // (HV // HK)
    begin, end, context, slot = find_rows(b, cu_ptr, slots_ptr, context_ptr, N, CACHED)
    held = context % C
    count = tl.where(begin < end, tl.cdiv(held + end - begin, C), 0)
    d = tl.arange(0, DP)
    e = tl.program_id(0) % BLOCKS * BE + tl.arange(0, BE)
    i = tl.arange(0, BLOCK)
    has_d = d < D
    has_e = (e < E)[:, None]
    dtype = keys_ptr.dtype.element_ty
    state = tl.zeros((BE, DP), tl.float32)
    state_at = state_ptr + slot * stride_state + h * D * E + d[None, :] * E + e[:, None]
    updates_at = updates_ptr + slot * stride_updates + h * E + e[:, None]
    if CACHED:
        moved = d < tl.where((context >= C) & (begin < end), D, 0)
        state = tl.load(state_at, mask=has_e & moved[None, :], other=0.0)
    for number in range(count):
        chunk = (begin // C + b * SPARE + number).to(tl.int64)
        head = chunk * HV + h
        first = begin - held + number * C
        read = state.to(dtype)
        starts_at = starts_ptr + (head * E + e[:, None]) * D + d[None, :]
        tl.store(starts_at, read, mask=has_e & has_d[None, :])
        last = tl.load(sums_ptr + head * C + C - 1)
        added = tl.zeros((BE, DP), tl.float32)
        updates = ()
        for block in tl.static_range(C // BLOCK):
            row = block * BLOCK + i
            t = first + row
            is_new = (t >= begin) & (t < end)
            live = has_e & is_new[None, :]
            at = (chunk * HK + hk) * C + row
            k = tl.load(keys_ptr + at[:, None] * D + d[None, :], mask=has_d[None, :], other=0.0)
            at = t.to(tl.int64) * HV + h
            v = tl.load(v_ptr + at[None, :] * E + e[:, None], mask=live, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + at, mask=is_new, other=0.0).to(tl.float32)
            sums = tl.load(sums_ptr + head * C + row)
            below_at = below_ptr + head * C * C + block * BLOCK
            far = ()
            for before in tl.static_range(block):
                at = below_at + (before * BLOCK + i[:, None]) * C + i[None, :]
                far = far + (tl.load(at),)  # noqa: RUF005 (Triton has no other way)
            cross = tl.zeros((BE, BLOCK), tl.float32)
            for part in tl.static_range(PARTS):
                for before in tl.static_range(block):
                    factors = part_of(far[before], part, dtype)
                    cross = tl.dot(updates[before], factors, cross, input_precision="ieee")
            k_state = tl.dot(read, tl.trans(k), input_precision="ieee")
            here = tl.broadcast_to(0.0 - tl.exp(sums)[None, :], k_state.shape)
            r = beta[None, :] * tl.fma(here, k_state, v)
            if CACHED:
                at = updates_at + row[None, :] * (HV * E)
                is_held = has_e & (t < begin)[None, :]
                old = tl.load(at, mask=is_held, other=0.0).to(tl.float32)
                r = tl.where(is_held, old, r)
            u = solve_block(r - cross, below_at + block * BLOCK * C, C, dtype)
            updates = updates + (u.to(dtype),)  # noqa: RUF005 (Triton has no other way)
            tl.store(u_ptr + (head * C + row[None, :]) * E + e[:, None], u.to(dtype), mask=has_e)
            if CACHED:
                kept = (t >= tl.where(first + C < end, end, begin)) & (t < end)
                at = updates_at + row[None, :] * (HV * E)
                tl.store(at, u.to(dtype), mask=has_e & kept[None, :])
            late = (u * tl.exp(last - sums)[None, :]).to(dtype)
            added = tl.dot(late, k, added, input_precision="ieee")
        is_full = first + C <= end
        decay = tl.broadcast_to(tl.exp(last), state.shape)
        state = tl.where(is_full, tl.fma(decay, state, added), state)
    if CACHED:
        moved = d < tl.where((held + end - begin >= C) & (begin < end), D, 0)
        tl.store(state_at, state, mask=has_e & moved[None, :])


@triton.jit(do_not_specialize=["N", "B"])
def out_kernel(
    queries_ptr, keys_ptr, sums_ptr, starts_ptr, u_ptr, out_ptr, kept_ptr, decays_ptr, stride_kept,
    stride_decays, slots_ptr, context_ptr, cu_ptr, N, B,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    BE: tl.constexpr, C: tl.constexpr, SPARE: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """out of BE features of a chunk of a value head. Also keeps k and G of the chunk that is open
    at a sequence's end: the kernels before have read what this writes over."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    hk = h // (HV // HK)
    b, number = find_chunk(cu_ptr, chunk, B, C, SPARE)
    begin, end, context, slot = find_rows(b, cu_ptr, slots_ptr, context_ptr, N, CACHED)
    first = begin - context % C + number * C
    if (number >= 0) & (first < end) & (begin < end):
        row = tl.arange(0, C)
        d = tl.arange(0, DP)
        e = tl.program_id(2) * BE + tl.arange(0, BE)
        t = first + row
        is_new = (t >= begin) & (t < end)
        has_d = (d < D)[None, :]
        head = chunk.to(tl.int64) * HV + h
        at = ((chunk.to(tl.int64) * HK + hk) * C + row[:, None]) * D + d[None, :]
        q = tl.load(queries_ptr + at, mask=has_d, other=0.0)
        k = tl.load(keys_ptr + at, mask=has_d, other=0.0)
        sums = tl.load(sums_ptr + head * C + row)
        at = starts_ptr + (head * E + e[:, None]) * D + d[None, :]
        read = tl.load(at, mask=(e < E)[:, None] & has_d, other=0.0)
        at = u_ptr + (head * C + row[:, None]) * E + e[None, :]
        u = tl.load(at, mask=(e < E)[None, :], other=0.0)
        upto = row[None, :] <= row[:, None]
        decay = tl.exp(tl.where(upto, sums[:, None] - sums[None, :], 0.0))
        qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights = tl.where(upto, decay * qk, 0.0).to(u.dtype)
        q_state = tl.dot(q, tl.trans(read), input_precision="ieee")
        inside = tl.dot(weights, u, input_precision="ieee")
        here = tl.broadcast_to(tl.exp(sums)[:, None], q_state.shape)
        out = tl.fma(here, q_state, inside)
        at = out_ptr + (t.to(tl.int64)[:, None] * HV + h) * E + e[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_new[:, None] & (e < E)[None, :])
        if CACHED and (tl.program_id(2) == 0) & (first + C >= end):
            tl.store(decays_ptr + slot * stride_decays + row * HV + h, sums, mask=is_new)
            if h % (HV // HK) == 0:
                kept_at = kept_ptr + slot * stride_kept + (row[:, None] * HK + hk) * D + d[None, :]
                tl.store(kept_at, k, mask=is_new[:, None] & has_d)
