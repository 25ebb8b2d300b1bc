"""What a float32 sum of exponentials loses, by the order in which a device adds them.

The terms of a sum are added one after the other to a total in float32, in several lanes at once. A
term that meets a total of ulp U is rounded to a multiple of U, for the total is one: what that
loses is known of each term, and has one sign where terms are alike. A confident row loses most: one
exponential is 1, and the thousands of small ones that follow it in its lane fall below half an ulp.

On a CPU torch adds the columns of a row in as many lanes as a register has
(`ATen/native/cpu/LogSoftmaxKernelImpl.h`): 16 with AVX-512, 8 with AVX2 or any other x86, 4 on
other processors. On a GPU blocks of 1,024 columns are added up as a tree, and each block's sum to
the total of those before it; threads that add columns with a stride of 1,024 lose less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_CPU_LANES = {"AVX512": (16,), "AVX2": (8,)}
_OTHER_LANES = (4, 8)
_GPU_BLOCK = 1024
_LEAST_EXPONENT = -125
"""The least exponent of float32, as `frexp` counts: below 2^-126 numbers lie 2^-149 apart."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """In which order the exponentials of a row are added."""

    lanes: int = 1
    """Totals that grow side by side; column j belongs to lane j modulo `lanes`."""
    block: int = 1
    """Neighbouring columns that are added up as a tree first."""


def sum_orders(environment: Mapping[str, str]) -> tuple[SumOrder, ...]:
    """The orders in which a side may add, by the environment that its capture recorded."""
    if environment.get("device_type", "cpu") != "cpu":
        return (SumOrder(block=_GPU_BLOCK),)
    lanes = _CPU_LANES.get(environment.get("capability", ""), _OTHER_LANES)
    return tuple(SumOrder(lanes=n) for n in lanes)


def lost_share(exponentials: torch.Tensor, orders: Sequence[SumOrder]) -> torch.Tensor:
    """The square of what a float32 sum is expected to lose, as a share of the sum, in that of the
    orders that loses most: float64 `[N, V]` -> `[N, 1]`."""
    return torch.stack([_lost(exponentials, order) for order in orders]).amax(dim=0)


def _lost(exponentials: torch.Tensor, order: SumOrder) -> torch.Tensor:
    whole = order.lanes * order.block
    padded = torch.nn.functional.pad(exponentials, (0, -exponentials.shape[1] % whole))
    if order.block > 1:
        padded = padded.reshape(len(padded), -1, order.block).sum(dim=2)
    terms = padded.reshape(len(padded), -1, order.lanes)
    added, total = terms[:, 1:], terms.cumsum(dim=1)
    exponent = torch.frexp(total[:, 1:]).exponent.clamp(min=_LEAST_EXPONENT)
    ulp = torch.ldexp(torch.ones_like(added), exponent - 24)
    systematic = (torch.round(added / ulp) * ulp - added).sum(dim=(1, 2))
    by_chance = (ulp.square() / 12).where(added > 0, 0.0).sum(dim=(1, 2))
    return ((systematic.square() + by_chance) / total[:, -1].sum(dim=1).square())[:, None]
