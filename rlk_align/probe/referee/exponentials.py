"""What a float32 sum of exponentials loses, by the order in which a device adds them.

The terms of a sum are added one after the other to a total in float32, in several lanes at once. A
term that meets a total of ulp U is rounded to a multiple of U, for the total is one: what that
loses is known of each term, and has one sign where terms are alike. A confident row loses most: one
exponential is 1, and the thousands of small ones that follow it in its lane fall below half an ulp.

On a CPU torch adds the columns of a row in as many lanes as a register has
(`ATen/native/cpu/LogSoftmaxKernelImpl.h`): 16 with AVX-512, 8 with AVX2, 4 at least elsewhere. On a
GPU blocks of 1,024 columns are added up as a tree, and each block's sum to the total of those
before it; threads that add columns with a stride of 1,024 lose less.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_CPU_LANES = {"AVX512": 16, "AVX2": 8}
_FEWEST_LANES = 4
_GPU_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class SumOrder:
    """In which order the exponentials of a row are added."""

    lanes: int = 1
    """Totals that grow side by side; column j belongs to lane j modulo `lanes`."""
    block: int = 1
    """Neighbouring columns that are added up as a tree first."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "SumOrder":
        """That of a side, by the environment that its capture recorded."""
        if environment.get("device_type", "cpu") != "cpu":
            return cls(block=_GPU_BLOCK)
        return cls(lanes=_CPU_LANES.get(environment.get("capability", ""), _FEWEST_LANES))


ONE_LANE = SumOrder()
"""One total: no engine loses more."""


def lost_share(exponentials: torch.Tensor, order: SumOrder) -> torch.Tensor:
    """The square of what a float32 sum is expected to lose, as a share of the sum: float64 `[N, V]`
    -> `[N, 1]`."""
    whole = order.lanes * order.block
    padded = torch.nn.functional.pad(exponentials, (0, -exponentials.shape[1] % whole))
    if order.block > 1:
        padded = padded.reshape(len(padded), -1, order.block).sum(dim=2)
    terms = padded.reshape(len(padded), -1, order.lanes)
    added, total = terms[:, 1:], terms.cumsum(dim=1)
    ulp = torch.ldexp(torch.ones_like(added), torch.frexp(total[:, 1:]).exponent - 24)
    systematic = (torch.round(added / ulp) * ulp - added).sum(dim=(1, 2))
    by_chance = (ulp.square() / 12).where(added > 0, 0.0).sum(dim=(1, 2))
    return ((systematic.square() + by_chance) / total[:, -1].sum(dim=1).square())[:, None]
