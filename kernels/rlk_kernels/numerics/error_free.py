"""Products by error-free splitting, for the portable backend (the Ozaki scheme).

A BLAS does not promise an order of summation: the order changes with the number of rows, the number
of threads and the machine. So the portable backend makes the order irrelevant. Each row is split
into slices: integers on a grid that belongs to that row alone (a power of two below its largest
magnitude). Products and sums of such integers stay under 2**53, so every partial sum is exact in
float64, and any order of additions, any blocking and any number of threads give the same bits. This
is a theorem about IEEE float64, not an observation about one library.

After K. Ozaki, T. Ogita, S. Oishi, S. M. Rump: Error-free transformations of matrix multiplication
by using fast routines of matrix multiplication and its applications. Numerical Algorithms 59
(2012), 95-118. Here the number of slices is fixed, and digits below the last slice are dropped.

Precision: with P = 53 - ceil(log2 K) bits for a product, bf16 operands take one slice each (for
K = 4096: 21 bits for `a`, 20 for `b`, below the largest magnitude of their row; a bf16 number has
8 bits, so only numbers far below that magnitude lose any), and fp16 and fp32 operands take two
slices each (2 x 20 bits at K = 4096, three products).

M, N = rows of a and b   K = the contracted dimension   leading dimensions are batch
"""

import math

import torch
from torch import Tensor


def pow2(exponent: Tensor) -> Tensor:
    """2**exponent as float64, exactly, for integer exponents in [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def exponent_of(x: Tensor) -> Tensor:
    """e[..., 1] with max|x| along the last dimension in [2**(e-1), 2**e); 0 for zeros, Inf, NaN."""
    if x.shape[-1] == 0:
        return torch.zeros(*x.shape[:-1], 1, dtype=torch.int32, device=x.device)
    top = x.abs().amax(dim=-1, keepdim=True).double()
    return torch.frexp(torch.where(top.isfinite(), top, 0.0)).exponent


def matmul_nt(a: Tensor, b: Tensor) -> Tensor:
    """a[..., M, K] @ b[..., N, K]^T in float64, the same bits for every order of summation.

    Row m of the result depends on row m of `a` and on `b`; column n on row n of `b` and on `a`.
    float64 operands (for gradcheck) go to the BLAS unchanged, without that guarantee.
    """
    if a.dtype == torch.float64 or b.dtype == torch.float64:
        return a.double() @ b.double().mT
    k = a.shape[-1]
    if k == 0:
        return a.new_zeros(*a.shape[:-1], b.shape[-2], dtype=torch.float64)
    exp_a, exp_b = exponent_of(a), exponent_of(b)
    if not a.dtype == b.dtype == torch.bfloat16:
        width = (52 - math.ceil(math.log2(k))) // 2
        hi_a, lo_a = _two_slices(a, exp_a, width)
        hi_b, lo_b = _two_slices(b, exp_b, width)
        high = hi_a @ hi_b.mT
        middle = torch.cat([hi_a, lo_a], -1) @ torch.cat([lo_b, hi_b], -1).mT
        total = middle.mul_(2.0**-width).add_(high)
        return total.mul_(pow2(exp_a - width)).mul_(pow2(exp_b - width).mT)
    bits = 53 - math.ceil(math.log2(k))
    width_b = bits // 2
    width_a = bits - width_b
    total = _slice(a, exp_a, width_a) @ _slice(b, exp_b, width_b).mT
    return total.mul_(pow2(exp_a - width_a)).mul_(pow2(exp_b - width_b).mT)


def _slice(x: Tensor, exponent: Tensor, width: int) -> Tensor:
    return x.double().mul_(pow2(width - exponent)).round_()


def _two_slices(x: Tensor, exponent: Tensor, width: int) -> tuple[Tensor, Tensor]:
    scaled = x.double().mul_(pow2(width - exponent))
    high = scaled.round()
    low = scaled.sub_(high).mul_(2.0**width).round_()
    return high, low
