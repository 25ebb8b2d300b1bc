"""The error of a float32 sum of exponentials, by the order in which a device adds them.

The terms are added one after the other to a float32 total, in several lanes at once. A term that is
added to a total with the ulp U is rounded to a multiple of U, so its error is known, and equal
terms have errors of one sign. A confident row loses most: one exponential is 1, and the thousands
of small ones that follow it in its lane are below half an ulp.

On a CPU torch adds the columns of a row in as many lanes as a register has
(`ATen/native/cpu/LogSoftmaxKernelImpl.h`): 16 with AVX-512, 8 with AVX2 or any other x86, 4 on
other processors. On a GPU each of torch's 1,024 threads adds four neighbouring columns of every
4,096 (`ATen/native/cuda/SoftMax.cu`). Others add up blocks of 1,024 columns as a tree, and the sums
of blocks one after the other. Which of the two loses more depends on the row: threads add terms of
rounded logits, of which many are equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_CPU_LANES = {"AVX512": (16,), "AVX2": (8,)}
_OTHER_LANES = (4, 8)
_GPU_BLOCK = 1024
_GPU_THREADS, _GPU_VECTOR = 1024, 4
_LEAST_EXPONENT = -125
"""The least exponent of float32, as `frexp` counts: below 2^-126 numbers lie 2^-149 apart."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The order in which the exponentials of a row are added."""

    lanes: int = 1
    """The number of parallel totals. They share neighbouring columns out in turn."""
    block: int = 1
    """The number of neighbouring columns that are first added up as a tree."""
    vector: int = 1
    """The number of neighbouring columns, or blocks, that a lane takes in its turn."""


def sum_orders(environment: Mapping[str, str]) -> tuple[SumOrder, ...]:
    """Returns the orders in which a side may add, by the environment of its capture."""
    if environment.get("device_type", "cpu") != "cpu":
        return SumOrder(block=_GPU_BLOCK), SumOrder(_GPU_THREADS, vector=_GPU_VECTOR)
    lanes = _CPU_LANES.get(environment.get("capability", ""), _OTHER_LANES)
    return tuple(SumOrder(lanes=n) for n in lanes)


def lost_share(exponentials: torch.Tensor, orders: Sequence[SumOrder]) -> torch.Tensor:
    """Returns the expected square of the relative error of a float32 sum, in the order that loses
    most: float64 `[N, V]` -> `[N, 1]`."""
    return torch.stack([_lost(exponentials, order) for order in orders]).amax(dim=0)


def _lost(exponentials: torch.Tensor, order: SumOrder) -> torch.Tensor:
    whole = order.lanes * order.block * order.vector
    padded = torch.nn.functional.pad(exponentials, (0, -exponentials.shape[1] % whole))
    if order.block > 1:
        padded = padded.reshape(len(padded), -1, order.block).sum(dim=2)
    turns = padded.reshape(len(padded), -1, order.lanes, order.vector)
    terms = turns.transpose(2, 3).flatten(1, 2)
    added, total = terms[:, 1:], terms.cumsum(dim=1)
    exponent = torch.frexp(total[:, 1:]).exponent.clamp(min=_LEAST_EXPONENT)
    ulp = torch.ldexp(torch.ones_like(added), exponent - 24)
    systematic = (torch.round(added / ulp) * ulp - added).sum(dim=(1, 2))
    by_chance = (ulp.square() / 12).where(added > 0, 0.0).sum(dim=(1, 2))
    return ((systematic.square() + by_chance) / total[:, -1].sum(dim=1).square())[:, None]
