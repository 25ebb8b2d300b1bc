"""The order of sums in the Triton kernels of `attention`, and the steps that they share.

Order of a row (one query of one head): keys are in chunks of CHUNK, aligned to key 0 of the
sequence. Within a chunk, blocks of `block_n` keys are processed from front to back with a running
maximum m, eight sums (key j in sum j mod 8) and an accumulator acc, all in fp32 and new for each
chunk. Then the eight sums are added into one, and (m, sum, acc) of the chunks are merged from front
to back. A block or a chunk that a row does not see does not change a bit of its state. So no bit
depends on the other queries, on the layout of the cache, or on whether one program processes all
chunks or each chunk has its own (SPLIT). `block_n` depends on head size and dtype alone.

T = queries  S = keys  D = head size  R = packed rows  BN = keys of a block
"""

import torch
import triton
import triton.language as tl

from rlk_kernels.device import interpreting

CHUNK = 1024
"""Keys of a chunk: the unit of parallel decode, and part of the order of the sum."""

LOG2E = 1.4426950408889634


def capped_scales(scale: float, softcap: float) -> tuple[float, float]:
    """The kernels' arguments (bend, scale): scores `capped` with bend, times scale, are exponents
    of two. Without a cap (softcap 0) they are (0, scale log2 e)."""
    if softcap:
        return -2.0 * LOG2E * scale / softcap, softcap * LOG2E
    return 0.0, scale * LOG2E


@triton.constexpr_function
def block_of_halves(dim):
    """Keys of a block of 16-bit numbers."""
    return 128 if dim in (64, 128) else 64


def block_n(dim: int, dtype: torch.dtype) -> int:
    """Keys of a block. They are part of the order of the sum, so they never depend on the batch."""
    if interpreting() or dtype == torch.float32:
        return 32
    return block_of_halves(dim)


@triton.constexpr_function
def sum_levels(keys):
    """The LEVELS of `eight_sums` of a block of keys."""
    return keys.bit_length() - 4


@triton.jit
def find_sequence(cu_ptr, block, B, G: tl.constexpr, BM: tl.constexpr):
    """(sequence b, its first token, its tokens, the first packed row) of row block `block`.

    b starts at block cu[b] * G // BM + b, which gives every sequence as many blocks as it needs.
    """
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu_ptr + middle) * G // BM + middle
        if start <= block:
            low = middle
        else:
            high = middle
    first = tl.load(cu_ptr + low)
    tokens = tl.load(cu_ptr + low + 1) - first
    return low, first, tokens, (block - (first * G // BM + low)) * BM


@triton.jit
def visible_keys(
    first_row, len_q, len_k, window, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Three keys that bound the keys of BM packed rows: no row sees a key before the first (a
    multiple of BN) or from the third on; every row sees all keys before the second."""
    begin = 0
    shared_end = len_k
    end = len_k
    if CAUSAL:
        offset = len_k - len_q
        shared_end = tl.maximum(first_row // G + offset + 1, 0)
        end = tl.maximum((tl.minimum(first_row + BM, len_q * G) - 1) // G + offset + 1, 0)
    if WINDOWED:
        begin = tl.maximum(shared_end - window, 0) // BN * BN
        shared_end = 0
    return begin, shared_end, end


@triton.jit
def attending_rows(
    first_key, len_q, len_k, window, BN: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Four bounds of the queries that see BN keys: only blocks of BM queries from the first to the
    second see any of them; queries from the third to the fourth see all of them."""
    begin = 0
    end = len_q
    plain_begin = 0
    plain_end = len_q
    offset = len_k - len_q
    if CAUSAL:
        begin = tl.maximum(first_key - offset, 0) // BM
        plain_begin = tl.minimum(first_key + BN, len_k) - 1 - offset
    if WINDOWED:
        plain_end = 0
        if CAUSAL:
            end = tl.minimum(len_q, tl.maximum(first_key + BN - 1 + window - offset, 0))
            plain_end = tl.minimum(len_q, first_key + window - offset)
    return begin, tl.cdiv(end, BM), plain_begin, plain_end


@triton.jit
def merge(m, den, acc, m_new, den_new, acc_new):
    """Merge (m, den, acc) with the state of one more chunk; an empty chunk changes nothing."""
    top = tl.maximum(m, m_new)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(m - safe)
    new = tl.exp2(m_new - safe)
    den = tl.fma(den, old, den_new * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), acc_new * new[:, None])
    return top, den, acc


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def eight_sums(p, LEVELS: tl.constexpr):
    """[R, 8 * 2**LEVELS] -> [R, 8]: column j in sum j mod 8, by halves (j with j + half).

    Every addition has two operands, so no layout of threads can change the order; in the layouts of
    the tensor core a thread has whole sums.
    """
    for level in tl.static_range(LEVELS):
        p = tl.reduce(tl.reshape(p, (p.shape[0], 2, 4 << (LEVELS - level))), 1, add)
    return p


@triton.jit
def one_sum(p):
    """[R, 8] -> [R], by halves."""
    for level in tl.static_range(3):
        p = tl.reduce(tl.reshape(p, (p.shape[0], 2, 4 >> level)), 1, add)
    return tl.reshape(p, (p.shape[0],))


@triton.jit
def capped(s, bend):
    """tanh(-bend s / (2 log2 e)), from the exponential of a number of at most 0."""
    t = tl.exp2(tl.abs(s) * bend)
    tanh = (1.0 - t) / (1.0 + t)
    return tl.where(s < 0.0, -tanh, tanh)


@triton.jit
def block_weights(s, m, scale, LEVELS: tl.constexpr):
    """(exp2(scale s - top), top, exp2(m - top), eight sums of the first) of scores s[R, BN] after a
    running maximum m[R]."""
    return weights_below(s, m, tl.maximum(m, tl.max(s, 1) * scale), scale, LEVELS)


@triton.jit
def weights_below(s, m, top, scale, LEVELS: tl.constexpr):
    """`block_weights` for a known maximum `top` after the block."""
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(s, scale, (0.0 - safe)[:, None]))
    return p, top, tl.exp2(m - safe), eight_sums(p, LEVELS)


@triton.jit
def result(m, den, acc):
    """(output, natural log-sum-exp); rows that see no key have (0, -inf)."""
    empty = den == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, den)
    out = acc * inverse[:, None] + 0.0  # + 0.0: an underflowed -0 becomes the +0 of a lone chunk
    lse = tl.where(
        empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, den))) * 0.6931471805599453
    )
    return out, lse


@triton.jit
def finish(m, den, acc, out_ptr, lse_ptr, token, head, live, cols, HQ, DIM: tl.constexpr, T):
    """Store the `result`."""
    out, lse = result(m, den, acc)
    row = token.to(tl.int64) * HQ + head
    mask = live[:, None] & (cols[None, :] < DIM)
    at = out_ptr + row[:, None] * DIM + cols[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head.to(tl.int64) * T + token, lse, mask=live)
