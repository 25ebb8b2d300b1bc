"""A product whose contracted dimension comes in pieces, with the bits of one that comes whole.

    C[m, n] = round( sum_k A[m, k] B[k, n] )          pieces of K, one call each, front to back

Order: that of `gemm.py`, one fp32 accumulator per element and K from front to back: a call starts
from the accumulator that the call before it left. So the cut of K (a multiple of 64) changes no
bit, and neither does the tile. Between calls the accumulator of a 16-bit output lies in two
halves: the upper 16 bits of each fp32 number in the output itself, the lower 16 in `low`. It costs
two bytes an element, not four, and the last call rounds in place. (On Hopper the same bytes hold
fp32 numbers in the order of the registers: `accumulate_hopper.py`.) An fp32 output is its own
accumulator.

A[M, K]: `a`, or `a` transposed (trans_a)   B[K, N]: `b`
"""

import torch
from torch import Tensor

from rlk_kernels.accumulate_triton import Sum, sum_triton, tile_of
from rlk_kernels.gemm import _processors, _runs_apart, _tma_can_read


def low_halves(out: Tensor, pieces: int) -> Tensor:
    """What `accumulate` needs beside `out` between `pieces` calls."""
    shape = out.shape if pieces > 1 and out.dtype != torch.float32 else (0,)
    return torch.empty(shape, dtype=torch.int16, device=out.device)


def _apart(x: Sum) -> bool:
    """Whether `accumulate_hopper.py` takes it: the same for all pieces, whatever their K."""
    (m, n), half = x.out.shape, x.out.element_size() == 2 and x.a.element_size() == 2
    if not half or n % 256 or not _runs_apart(x.out.device):
        return False
    from rlk_kernels.cornerstone import holds

    trusted = holds(x.out.device)
    large = trusted and tile_of(m, n, 4096, _processors(x.out.device), trusted).n == 256
    return large and _tma_can_read(x.a) and _tma_can_read(x.b) and _tma_can_read(x.out)


def accumulate(*pieces: Sum) -> None:
    """One piece, or one of each of two products, which may share a launch."""
    pieces = tuple(x for x in pieces if x.out.numel())
    apart = [_apart(x) for x in pieces]
    if any(apart):
        from rlk_kernels.accumulate_hopper import sum_hopper  # Gluon changes with every Triton

        together = tuple(x for x, own in zip(pieces, apart, strict=True) if own)
        sum_hopper(together, _processors(together[0].out.device))
    for x, own in zip(pieces, apart, strict=True):
        if not own:
            sum_triton(x)
