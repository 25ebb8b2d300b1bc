"""The Triton kernel of the gated delta rule for a row of each sequence, as in a step of decode.

The row is in a tile whose other rows are zeros, so that its products are those of `kernels.py`.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.delta_rule.steps import BLOCK, find_rows, normed, part_of, picked


@triton.jit
def _row(x_ptr, at, scale, eps, D: tl.constexpr, DP: tl.constexpr, LEVELS: tl.constexpr):
    """[1, DP] of q or k, normed and rounded."""
    d = tl.arange(0, DP)
    x = tl.reshape(tl.load(x_ptr + at + d, mask=d < D, other=0.0), (1, DP))
    live = tl.reshape(d < D, (1, DP))
    return tl.where(live, normed(x, scale, eps, 1, DP, LEVELS), 0.0).to(x.dtype)


@triton.jit(do_not_specialize=["N"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, state_ptr, keys_ptr, updates_ptr, decays_ptr,
    stride_state, stride_keys, stride_updates, stride_decays, slots_ptr, context_ptr, cu_ptr, N,
    scale, eps,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr,
    BE: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """SHARE pieces of work of a head of q and k of a sequence: BE features of a value head each. Of
    a sequence with several rows, all pieces read what the last writes over, so one program does the
    work of all."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    GROUP: tl.constexpr = HV // HK
    PROGRAMS: tl.constexpr = BLOCKS * GROUP // SHARE
    mine = tl.program_id(0) % PROGRAMS
    hk = tl.program_id(0) // PROGRAMS % HK
    b = tl.program_id(0) // (PROGRAMS * HK)
    begin, end, context, slot = find_rows(b, cu_ptr, slots_ptr, context_ptr, N, True)
    low = mine * SHARE
    high = low + SHARE
    if end - begin > 1:
        high = tl.where(mine == 0, BLOCKS * GROUP, low)
    j = tl.arange(0, C)
    d = tl.arange(0, DP)
    m = tl.arange(0, BLOCK)[:, None]
    has_d = (d < D)[None, :]
    dtype = q_ptr.dtype.element_ty
    keys_at = keys_ptr + slot * stride_keys + hk * D + j[:, None] * (HK * D) + d[None, :]
    for number in range(end - begin):
        i = (context + number) % C
        is_old = (context + number) >= C  # a chunk has moved the state
        t = begin.to(tl.int64) + number
        q_i = _row(q_ptr, (t * HK + hk) * D, scale, eps, D, DP, LEVELS)
        k_i = _row(k_ptr, (t * HK + hk) * D, 1.0, eps, D, DP, LEVELS)
        both = tl.where(m == 0, k_i, tl.where(m == 1, q_i, 0.0)).to(dtype)
        keys = tl.load(keys_at, mask=(j < i)[:, None] & has_d, other=0.0)
        keys = tl.where((j == i)[:, None], k_i, keys)
        products = tl.dot(both, tl.trans(keys), input_precision="ieee")
        for work in range(low, high):
            h = hk * GROUP + work // BLOCKS
            e = work % BLOCKS * BE + tl.arange(0, BE)
            has_e = e < E
            decays_at = decays_ptr + slot * stride_decays + h
            sums = tl.load(decays_at + j * HV, mask=j < i, other=0.0)
            total = tl.load(decays_at + (i - 1) * HV, mask=i > 0, other=0.0)
            total = total + tl.load(g_ptr + t * HV + h)
            beta = tl.load(beta_ptr + t * HV + h).to(tl.float32)
            v = tl.load(v_ptr + (t * HV + h) * E + e, mask=has_e, other=0.0).to(tl.float32)
            state_at = state_ptr + slot * stride_state + h * D * E + d[:, None] * E + e[None, :]
            moved = d < tl.where(is_old, D, 0)
            read = tl.load(state_at, mask=moved[:, None] & has_e[None, :], other=0.0).to(dtype)
            updates_at = updates_ptr + slot * stride_updates + h * E + e[None, :]
            at = updates_at + j[:, None] * (HV * E)
            u = tl.load(at, mask=(j < i)[:, None] & has_e[None, :], other=0.0)
            block = i // BLOCK * BLOCK + tl.arange(0, BLOCK)
            at = updates_at + block[:, None] * (HV * E)
            near = tl.load(at, mask=(block < i)[:, None] & has_e[None, :], other=0.0)

            decay = tl.exp(tl.where(j <= i, total - tl.where(j == i, total, sums), 0.0))
            factors = products * decay[None, :]
            is_below = (m == 0) & (j < i)[None, :]
            below = tl.where(is_below, factors * beta, 0.0)
            far = tl.where((j < i // BLOCK * BLOCK)[None, :], below, 0.0)
            cross = tl.zeros((BLOCK, BE), tl.float32)
            for part in tl.static_range(PARTS):
                cross = tl.dot(part_of(far, part, dtype), u, cross, input_precision="ieee")
            states = tl.dot(both, read, input_precision="ieee")
            here = tl.broadcast_to(tl.exp(total), states.shape)
            r = beta * tl.fma(0.0 - here, states, tl.broadcast_to(v[None, :], states.shape))
            parts = tl.reshape(below, (BLOCK, C // BLOCK, BLOCK))
            which = tl.arange(0, C // BLOCK)[None, :, None]
            beside = tl.sum(tl.where(which == i // BLOCK, parts, 0.0), 1)
            r = tl.dot(0.0 - beside, near.to(tl.float32), r - cross, input_precision="ieee")
            u_i = (picked(r, m == 0, 0).to(dtype).to(tl.float32) + 0.0).to(dtype)  # a zero is +0
            u = tl.where((j == i)[:, None], u_i[None, :], u)
            weights = tl.where((m == 1) & (j <= i)[None, :], factors, 0.0).to(dtype)
            inside = tl.dot(weights, u, input_precision="ieee")
            out = picked(tl.fma(here, states, inside), m == 1, 0)
            at = out_ptr + (t * HV + h) * E + e
            tl.store(at, out.to(out_ptr.dtype.element_ty), mask=has_e)
            at = updates_ptr + slot * stride_updates + (i * HV + h) * E + e
            tl.store(at, u_i, mask=has_e)
            if work % BLOCKS == 0:
                tl.store(decays_at + i * HV, total)
            if i == C - 1:
                later = tl.exp(total - tl.where(j == i, total, sums))
                late = (u.to(tl.float32) * later[:, None]).to(dtype)
                # What was loaded before would take registers in every step.
                every = tl.load(keys_at, mask=(j < i)[:, None] & has_d, other=0.0)
                every = tl.where((j == i)[:, None], k_i, every)
                added = tl.dot(tl.trans(every), late, input_precision="ieee")
                state = tl.load(state_at, mask=moved[:, None] & has_e[None, :], other=0.0)
                state = tl.fma(tl.broadcast_to(tl.exp(total), state.shape), state, added)
                tl.store(state_at, state, mask=(d < D)[:, None] & has_e[None, :])
        if (mine == 0) & (low < high):
            at = keys_ptr + slot * stride_keys + (i * HK + hk) * D + d
            tl.store(at, tl.reshape(k_i, (DP,)), mask=d < D)
        tl.debug_barrier()
