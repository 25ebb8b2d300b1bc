"""The Triton kernel of `head_linear`: one launch over (block of tokens and of columns, head).

    C[t, h, n] = round( sum_{k = 0, 1, ...} A[t, h, k] * B[h][k, n] )

Order: that of `matmul/kernels.py`, one fp32 accumulator from front to back, in tiles whose shapes
the self-check of `matmul` covers, so a row of a head has the bits of `linear`. TMA reads both
operands where they lie: a head is a range of A's columns, and of the rows of B.
"""

import triton
import triton.language as tl

from rlk_kernels.ops.overlap import begin_overlapped


@triton.jit(do_not_specialize=["T"])
def _head_kernel(
    a_desc, b_desc, c_ptr, rest_ptr, T, N, K, step_a, step_b, stride_ct, stride_ch, stride_rt,
    stride_rh,
    TRANS_B: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """step_a, step_b: the columns of A, and the rows of B, from a head to the next. TRANS_B: B[h]
    is a transposed weight [N, K], otherwise a weight [K, N]. The programs of the last column block
    copy the R features of `rest`; BR: a power of two of at least R; 0: there are none."""
    begin_overlapped(OVERLAP)
    head = tl.program_id(1)
    blocks = tl.cdiv(N, BN)
    if BR > 0:
        blocks += 1
    row = tl.program_id(0) // blocks * BM
    col = tl.program_id(0) % blocks * BN
    rows = row + tl.arange(0, BM)
    at = c_ptr + rows.to(tl.int64)[:, None] * stride_ct + head.to(tl.int64) * stride_ch
    if col < N:
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(K, BK)):
            k = step * BK
            a = a_desc.load([row, head * step_a + k])
            if TRANS_B:
                b = b_desc.load([head * step_b + col, k]).T
            else:
                b = b_desc.load([head * step_b + k, col])
            acc = tl.dot(a, b, acc)
        cols = col + tl.arange(0, BN)
        mask = (rows[:, None] < T) & (cols[None, :] < N)
        tl.store(at + cols[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)
    elif BR > 0:
        features = tl.arange(0, BR)[None, :]
        there = (rows[:, None] < T) & (features < R)
        rest = rest_ptr + rows.to(tl.int64)[:, None] * stride_rt + head.to(tl.int64) * stride_rh
        tl.store(at + N + features, tl.load(rest + features, mask=there), mask=there)
