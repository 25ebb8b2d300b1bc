"""Which ranks of a side hold what differs: by features, by rows, or by copies that are unequal."""

from collections.abc import Mapping

import numpy as np
import torch

from rlk_align.compare.pairing import PairedSite
from rlk_align.model.sites import RowIndex, Site
from rlk_align.trace.reader import PassReader
from rlk_align.trace.schema import copy_name

Shards = list[tuple[int, int, int]]
"""(rank, first feature, feature after the last) of a site."""


class Holders:
    """Who holds what of one pass."""

    def __init__(self, reader: PassReader, shards: Mapping[str, Shards]) -> None:
        self._rows, self._shards = reader.record.held, shards

    def ranks(
        self,
        site: Site,
        paired: PairedSite,
        which: int,
        introduced: np.ndarray,
        features: np.ndarray,
        index: RowIndex,
    ) -> set[int]:
        """Of the introduced rows, bool `[N]`. `which`: the pair's first pass (0) or its second;
        `features`: those that differ, bool `[F]`, empty where no values were kept."""
        if copies := _unlike(paired, which, introduced):
            return copies
        if site.name in self._shards:
            held = self._shards[site.name]
            return {rank for rank, start, stop in held if features[start:stop].any()}
        # What one rank reports of rows that all of them computed is not that rank's alone.
        if self._shards and site.op == "logprob":
            return set()
        return self._of_rows(paired.number[introduced], index)

    def _of_rows(self, number: np.ndarray, index: RowIndex) -> set[int]:
        if not self._rows:
            return set()
        rank_of = np.full(len(index), -1)
        for held in self._rows:
            first = index.offsets[held.sample]
            stop = min(first + held.stop, index.offsets[held.sample + 1])
            rank_of[first + held.start : stop] = held.rank
        return set(rank_of[number].tolist()) - {-1}


def _unlike(paired: PairedSite, which: int, introduced: np.ndarray) -> set[int]:
    """Of rows that ranks of one pass hold different copies of: those whose copy is unlike the other
    pass's. Rank 0's is the one that is recorded under the site's name."""
    other = paired.b.digest[paired.b_at] if which == 0 else paired.a.digest[paired.a_at]
    ranks = {0, *paired.copies[which]} if paired.copies[which] else set()
    return {
        rank
        for rank in ranks
        if (introduced & (paired.digest_of(which, rank) != other).any(axis=1)).any()
    }


def use_copies(
    values: torch.Tensor, paired: PairedSite, which: int, part: np.ndarray, reader: PassReader
) -> None:
    """Writes a rank's copies over rows of `values` `[len(part), F]`, one pass's, of which rank 0's
    copy has the other pass's bits: metrics are of the copy that is off."""
    same = paired.recorded_equal[part]
    for rank, copy in paired.copies[which].items():
        here, at = copy.find(paired.number[part])
        kept = copy.rows.shard[at] >= 0
        use = same[here] & kept
        rows = np.flatnonzero(here)[use]
        if len(rows):
            name = copy_name(paired.site.name, rank)
            values[torch.from_numpy(rows)] = reader.values(name, copy.rows, at[use])
