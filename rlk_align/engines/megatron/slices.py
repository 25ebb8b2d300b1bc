"""Sequences that ranks of context parallelism share, as megatron-core slices them: each is cut into
2 R equal parts, of which rank r of R has the parts r and 2 R - 1 - r, so that causal attention
gives all ranks as much to do.

T = rows of all sequences, those behind them that fill them up included
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rlk_align.engines.process.ranks import Ranks, all_gather


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of sequences that begin at `begins[:-1]` and end at `begins[1:]`, each of a
    multiple of 2 R rows."""

    begins: tuple[int, ...]
    ranks: Ranks

    def columns(self, rank: int | None = None) -> np.ndarray:
        """int64 `[T / R]`: the rows of one rank, this one's by default, in its own order."""
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
        """`[T, ...]` of this rank's `[T / R, ...]`; called on all ranks that share them."""
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
