"""sample with its logits divided among ranks, with the tokens and the bits of one rank.

The ranks gather the logits, as engines do before they sample, and each draws for itself.
"""

from typing import Any

from torch import Tensor

from rlk_kernels.ops.sample.operator import Sampled, sample
from rlk_kernels.parallel.copies import Group, gather_columns


def sample_parallel(
    logits: Tensor, keys: Tensor, positions: Tensor, group: Group, **options: Any
) -> Sampled:
    """`sample` of the logits of all ranks side by side, from this rank's logits[T, V / R]. Columns
    of padding are -inf, so that none is drawn. Call this on all ranks of the group with the same
    other arguments, which are those of `sample`; None is one rank."""
    return sample(gather_columns(logits, group), keys, positions, **options)
