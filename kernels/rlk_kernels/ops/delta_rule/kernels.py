"""The Triton kernels of the gated delta rule's forward.

A program has BE features of a value head of one sequence, and goes through its rows one by one. So
decode, which has one row, and prefill run the same instructions on a row: sums over features and
over the rows of a chunk are by halves (`steps.py`), and rows that a chunk does not have yet add
zeros. The state's sum over a full chunk is one product of CHUNK rows.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.delta_rule.steps import sum_columns, sum_rows


@triton.jit
def norm_kernel(
    x_ptr, y_ptr, scale, eps, D: tl.constexpr, DP: tl.constexpr, D_LEVELS: tl.constexpr
):
    """A row: x * scale / sqrt(sum of squares + eps), rounded."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    square = sum_columns(tl.reshape(x * x, (1, DP)), 1, DP, D_LEVELS)
    y = tl.reshape(x, (1, DP)) * (tl.rsqrt(square + eps) * scale)[:, None]
    at = y_ptr + row * D + d
    tl.store(at, tl.reshape(y, (DP,)).to(y_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, state_ptr, keys_ptr, updates_ptr, decays_ptr,
    stride_state, stride_keys, stride_updates, stride_decays, slots_ptr, context_ptr, cu_ptr, N,
    starts_ptr, u_ptr, sums_ptr,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    BE: tl.constexpr, C: tl.constexpr, D_LEVELS: tl.constexpr, C_LEVELS: tl.constexpr,
    CACHED: tl.constexpr, RECORD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """CACHED: sequences continue from their slots, which are written. RECORD: the states at the
    beginnings of chunks, u and G are stored for the backward."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    hk = h // (HV // HK)
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    d = tl.arange(0, DP)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    j = tl.arange(0, C)
    has_d = d < D
    has_e = e < E
    dtype = q_ptr.dtype.element_ty
    state = tl.zeros((DP, BE), tl.float32)
    keys = tl.zeros((C, DP), dtype)
    u = tl.zeros((C, BE), dtype)
    sums = tl.zeros((C,), tl.float32)
    total = 0.0
    first = begin - begin
    slot = tl.zeros((), tl.int64)
    if CACHED:
        first = tl.load(context_ptr + b)
        slot = tl.load(slots_ptr + b).to(tl.int64)
        if (slot < 0) | (slot >= N):
            end = begin
            slot = slot * 0
    state_at = state_ptr + slot * stride_state + h * D * E + d[:, None] * E + e[None, :]
    keys_at = keys_ptr + slot * stride_keys + hk * D + j[:, None] * (HK * D) + d[None, :]
    updates_at = updates_ptr + slot * stride_updates + h * E + j[:, None] * (HV * E) + e[None, :]
    decays_at = decays_ptr + slot * stride_decays + h + j * HV
    if CACHED and begin < end:
        held = first % C
        is_held = j < held
        moved = d < tl.where(first >= C, D, 0)  # no feature before a first full chunk
        state = tl.load(state_at, mask=moved[:, None] & has_e[None, :], other=0.0)
        keys = tl.load(keys_at, mask=is_held[:, None] & has_d[None, :], other=0.0)
        u = tl.load(updates_at, mask=is_held[:, None] & has_e[None, :], other=0.0)
        sums = tl.load(decays_at, mask=is_held, other=0.0)
        total = tl.sum(tl.where(j == held - 1, sums, 0.0), 0)

    for n in range(end - begin):
        i = (first + n) % C
        row = begin.to(tl.int64) + n
        q_i = tl.load(q_ptr + (row * HK + hk) * D + d, mask=has_d, other=0.0).to(tl.float32)
        k_i = tl.load(k_ptr + (row * HK + hk) * D + d, mask=has_d, other=0.0)
        v_i = tl.load(v_ptr + (row * HV + h) * E + e, mask=has_e, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + row * HV + h).to(tl.float32)
        total = tl.where(i == 0, 0.0, total) + tl.load(g_ptr + row * HV + h)
        if RECORD and i == 0:
            chunk = (begin // C + b + n // C).to(tl.int64)
            starts_at = starts_ptr + (chunk * HV + h) * D * E + d[:, None] * E + e[None, :]
            tl.store(starts_at, state, mask=has_d[:, None] & has_e[None, :])
        keys = tl.where(j[:, None] == i, k_i[None, :], keys)
        sums = tl.where(j == i, total, sums)
        k_i = k_i.to(tl.float32)
        wide_keys = keys.to(tl.float32)
        kk = sum_columns(wide_keys * k_i[None, :], C, DP, D_LEVELS)
        qk = sum_columns(wide_keys * q_i[None, :], C, DP, D_LEVELS)
        decay = tl.exp(tl.where(j <= i, total - sums, 0.0))
        here = tl.exp(total)
        read = state.to(dtype).to(tl.float32)
        k_state = sum_rows(read * k_i[:, None], DP, BE, D_LEVELS)
        q_state = sum_rows(read * q_i[:, None], DP, BE, D_LEVELS)
        below = decay * kk * beta
        terms = tl.where(j[:, None] < i, below[:, None] * u.to(tl.float32), 0.0)
        u_i = beta * (v_i - here * k_state) - sum_rows(terms, C, BE, C_LEVELS)
        u_i = u_i.to(dtype)
        u = tl.where(j[:, None] == i, u_i[None, :], u)
        weights = (decay * qk).to(dtype).to(tl.float32)
        terms = tl.where(j[:, None] <= i, weights[:, None] * u.to(tl.float32), 0.0)
        out = here * q_state + sum_rows(terms, C, BE, C_LEVELS)
        tl.store(out_ptr + (row * HV + h) * E + e, out.to(out_ptr.dtype.element_ty), mask=has_e)
        if RECORD:
            tl.store(u_ptr + (row * HV + h) * E + e, u_i, mask=has_e)
            if tl.program_id(2) == 0:
                tl.store(sums_ptr + row * HV + h, total)
        if i == C - 1:
            late = (u.to(tl.float32) * tl.exp(total - sums)[:, None]).to(dtype)
            added = tl.dot(tl.trans(keys), late, input_precision=PRECISION)
            state = here * state + added
            if CACHED:
                tl.store(state_at, state, mask=has_d[:, None] & has_e[None, :])

    if CACHED and begin < end:
        # The rows of the chunk that is open at the end; those before the new rows are there.
        now = (first + end - begin) % C
        new = (j < now) & (j >= now - (end - begin))
        tl.store(updates_at, u, mask=new[:, None] & has_e[None, :])


@triton.jit(do_not_specialize=["N"])
def keep_kernel(
    k_ptr, g_ptr, keys_ptr, decays_ptr, stride_keys, stride_decays, slots_ptr, context_ptr, cu_ptr,
    N, HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keeps k and G of the new rows of the chunk that is open at the end. Several programs of
    `forward_kernel` read what this writes over, so it runs after them."""
    b = tl.program_id(0)
    h = tl.program_id(1)
    begin = tl.load(cu_ptr + b)
    end = tl.load(cu_ptr + b + 1)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    if (slot < 0) | (slot >= N):
        end = begin
        slot = slot * 0
    now = (tl.load(context_ptr + b) + end - begin) % C
    first = tl.maximum(now - (end - begin), 0)
    d = tl.arange(0, DP)
    decays_at = decays_ptr + slot * stride_decays + h
    total = tl.load(decays_at + (first - 1) * HV, mask=(first > 0) & (first < now), other=0.0)
    for n in range(now - first):
        row = (end - (now - first) + n).to(tl.int64)
        total = total + tl.load(g_ptr + row * HV + h)
        tl.store(decays_at + (first + n) * HV, total)
        if h < HK:
            k = tl.load(k_ptr + (row * HK + h) * D + d, mask=d < D)
            at = keys_ptr + slot * stride_keys + ((first + n) * HK + h) * D + d
            tl.store(at, k, mask=d < D)
