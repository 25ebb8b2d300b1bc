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

from collections.abc import Sequence

import torch
from torch import Tensor

from rlk_kernels.accumulate_triton import Sum, sum_triton, tile_of
from rlk_kernels.gemm import _processors, _runs_apart, _tma_can_read


def low_halves(out: Tensor, pieces: int) -> Tensor:
    """What `accumulate` needs beside `out` between `pieces` calls."""
    shape = out.shape if pieces > 1 and out.dtype != torch.float32 else (0,)
    return torch.empty(shape, dtype=torch.int16, device=out.device)


def _fits_hopper(x: Sum) -> bool:
    """Whether `accumulate_hopper.py` can take it."""
    half = x.out.element_size() == 2 and x.a.element_size() == 2
    if not half or x.out.shape[1] % 256 or not _runs_apart(x.out.device):
        return False
    from rlk_kernels.cornerstone import holds

    return holds(x.out.device) and all(_tma_can_read(y) for y in (x.a, x.b, x.out))


def _large(x: Sum) -> bool:
    """Whether tiles of the whole output keep a GPU busy: the same for all pieces, whatever their K
    and rows, as the two kernels keep sums in ways of their own."""
    m, n = x.rows or x.out.shape[0], x.out.shape[1]
    return tile_of(m, n, 4096, _processors(x.out.device), True).n == 256


def hopper_widths(pieces: Sequence[Sum]) -> list[int]:
    """The width of each one's tiles on Hopper; 0: for the kernels of `accumulate_triton.py`."""
    able = [_fits_hopper(x) for x in pieces]
    widths = [256 if can and _large(x) else 0 for x, can in zip(pieces, able, strict=True)]
    if any(widths) and all(able) and not all(widths):
        # Gluon changes with every Triton: imported where it runs
        from rlk_kernels.accumulate_shares import width_beside

        few = widths.index(0)
        processors = _processors(pieces[0].out.device)
        widths[few] = width_beside(pieces[few], pieces[1 - few], processors)
    return widths


def accumulate(*pieces: Sum) -> None:
    """One piece, or one of each of two products, which may share a launch."""
    pieces = tuple(x for x in pieces if x.out.numel())
    widths = hopper_widths(pieces)
    if any(widths):
        from rlk_kernels.accumulate_hopper import sum_hopper

        both = [x for x in zip(pieces, widths, strict=True) if x[1]]
        sum_hopper(both, _processors(pieces[0].out.device))
    for x, width in zip(pieces, widths, strict=True):
        if not width:
            sum_triton(x)
