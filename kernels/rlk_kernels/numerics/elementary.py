"""exp, log, sine and cosine from additions and multiplications, for the portable backend.

`torch.exp` and similar functions run a vector routine over most of a tensor and a scalar routine
over its tail (and over the tail of each thread's share). The two may round differently, so an
element's value depends on its position. IEEE rules round additions, multiplications, divisions and
square roots correctly at any position. The functions here consist of these operations alone, so an
element has the same bits at every position. All take and return float64, elementwise.
Accuracy: the relative error is below 2**-46 over the stated ranges (a test checks this).
"""

import math

import torch
from torch import Tensor

from rlk_kernels.numerics.error_free import pow2

_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_HALF_PI_HIGH = 1.5707963267341256  # the upper 33 bits of pi/2: k times it is exact below 2**20
_HALF_PI_LOW = 6.077100506506192e-11


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total.mul_(x).add_(c)
    return total


def exp(x: Tensor) -> Tensor:
    """exp(x); arguments are clamped to [-700, 700], so exp(-inf) is 1e-304, 0 in float32."""
    x = x.double().clamp(-700.0, 700.0)
    n = (x * _LOG2E).round_()
    r = x - n * _LN2
    return _horner(r, [1 / math.factorial(i) for i in range(11, -1, -1)]).mul_(pow2(n))


def log(x: Tensor) -> Tensor:
    """log(x) for finite x > 0; -inf at 0, NaN for NaN, +inf for +inf."""
    x = x.double()
    m, e = torch.frexp(x)
    small = m < math.sqrt(0.5)
    m = torch.where(small, m * 2.0, m)
    e = e.double() - small.double()
    t = (m - 1.0) / (m + 1.0)
    series = _horner(t * t, [2 / i for i in range(21, 0, -2)])
    value = t * series + e * _LN2
    value = torch.where(x == 0.0, -math.inf, value)
    return torch.where(x.isfinite(), value, x)


def sin_cos(angle: Tensor) -> tuple[Tensor, Tensor]:
    """(sin, cos) of an angle in radians, |angle| < 1.6e6."""
    angle = angle.double()
    k = (angle * (2 / math.pi)).round_()
    r = (angle - k * _HALF_PI_HIGH) - k * _HALF_PI_LOW
    square = r * r
    sin = r * _horner(square, [(-1) ** i / math.factorial(2 * i + 1) for i in range(8, -1, -1)])
    cos = _horner(square, [(-1) ** i / math.factorial(2 * i) for i in range(9, -1, -1)])
    quarter = k.to(torch.int64) & 3
    odd = (quarter & 1).bool()
    sin_out = torch.where(odd, cos, sin) * torch.where(quarter >= 2, -1.0, 1.0)
    cos_out = torch.where(odd, sin, cos) * torch.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
    return sin_out, cos_out


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float64."""
    return 1.0 / (1.0 + exp(-x))
