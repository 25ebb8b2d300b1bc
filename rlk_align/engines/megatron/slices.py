"""The slices of sequences in context parallelism, as megatron-core cuts them: rank r of R has the
parts r and 2 R - 1 - r of the 2 R equal parts of each sequence, so that causal attention takes all
ranks equally long.

T = rows of all sequences, including the padding after each
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rlk_align.engines.process.ranks import Ranks, all_gather


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of sequences that begin at `begins[:-1]` and end at `begins[1:]`; the number of
    rows of each is a multiple of 2 R."""

    begins: tuple[int, ...]
    ranks: Ranks

    def columns(self, rank: int | None = None) -> np.ndarray:
        """int64 `[T / R]`: the rows of a rank, by default this one, in its order."""
        world = self.ranks.world
        if world == 1:
            return np.arange(self.begins[-1])
        r = self.ranks.rank if rank is None else rank
        held = []
        for begin, end in pairwise(self.begins):
            part, odd = divmod(end - begin, 2 * world)
            assert not odd, (self.begins, world)
            held += [np.arange(begin + n * part, begin + (n + 1) * part) for n in _parts(r, world)]
        return np.concatenate(held)

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """`[T, ...]` from this rank's `[T / R, ...]`; called on all ranks of the sequences."""
        if self.ranks.world == 1:
            return local
        whole = local.new_empty(self.begins[-1], *local.shape[1:])
        for rank, rows in enumerate(all_gather(local, self.ranks)):
            whole[torch.from_numpy(self.columns(rank)).to(local.device)] = rows
        return whole

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of `[T, ...]`."""
        if self.ranks.world == 1:
            return whole
        return whole[torch.from_numpy(self.columns()).to(whole.device)]


def _parts(rank: int, world: int) -> tuple[int, int]:
    return rank, 2 * world - 1 - rank
