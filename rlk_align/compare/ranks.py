"""Finds the ranks of a side that hold the differing values: by features, rows or unequal copies."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlk_align.compare.pairing import PairedSite
from rlk_align.model.sites import RowIndex, Site
from rlk_align.trace.reader import PassReader
from rlk_align.trace.schema import HeldRows, copy_name
from rlk_align.trace.values import RecordedRows

Shards = list[tuple[int, int, int]]
"""(rank, first feature, feature after the last) of a site."""


class Holders:
    """The ranks that hold the sites and rows of one pass."""

    def __init__(
        self,
        reader: PassReader,
        shards: Mapping[str, Shards],
        stages: Mapping[str, list[int]],
        experts: Sequence[list[int]],
    ) -> None:
        self._reader, self._rows = reader, reader.record.held
        self._shards, self._stages, self._experts = shards, stages, experts

    def ranks(
        self,
        site: Site,
        paired: PairedSite,
        which: int,
        introduced: np.ndarray,
        features: np.ndarray,
        index: RowIndex,
    ) -> set[int]:
        """Returns the ranks that hold the differing values of the introduced rows, bool `[N]`.
        `which`: the pair's first pass (0) or its second. `features`: the differing features, bool
        `[F]`, empty where no values were kept."""
        if copies := self._unlike(paired, which, introduced, index):
            return copies
        if self._experts and (site.experts or site.operator.formula == "combine"):
            owners = self._of_experts(site, paired.number[introduced], index)
            if owners:
                return owners
        rows, stage = self._of(paired.number[introduced], index), self._stages.get(site.name, [])
        if site.name in self._shards:
            held = self._shards[site.name]
            ranks = {rank for rank, start, stop in held if features[start:stop].any()}
            sharing = [ranks.intersection(h.sharing) if h.sharing else ranks for h in rows]
            return set().union(*sharing) if rows else ranks
        # Log-probs that one rank reports follow from logits of all ranks.
        if self._shards and site.op == "logprob":
            return set()
        if not rows:
            return set(stage)
        return {h.rank for h in rows if not stage or h.rank in stage}

    def _of_experts(self, site: Site, number: np.ndarray, index: RowIndex) -> set[int]:
        """Returns the ranks that have the experts of these rows, where each row was sent to at
        least one of their experts and this holds for no other ranks."""
        choice, of_layer = RecordedRows(self._reader, index), f"layers.{site.layer}.experts"
        if not len(number) or not choice.has_value(of_layer)[number].all():
            return set()
        ids = choice.values(of_layer, number)
        stage = set(self._stages.get(site.name, []))
        owners = [
            frozenset(ranks) & stage if stage else frozenset(ranks) for ranks in self._experts
        ]
        sent = [{owners[e] for e in row} for row in ids.tolist()]
        behind = frozenset.intersection(*map(frozenset, sent))
        return set(*behind) if len(behind) == 1 else set()

    def _of(self, number: np.ndarray, index: RowIndex) -> list[HeldRows]:
        """Returns which rank holds which of these rows."""
        wanted = np.zeros(len(index), dtype=bool)
        wanted[number] = True

        def any_of(held: HeldRows) -> bool:
            first = index.offsets[held.sample]
            stop = min(first + held.stop, index.offsets[held.sample + 1])
            return bool(wanted[first + held.start : stop].any())

        return [held for held in self._rows if any_of(held)]

    def _unlike(
        self, paired: PairedSite, which: int, introduced: np.ndarray, index: RowIndex
    ) -> set[int]:
        """Returns the ranks whose copy differs from that of the other pass, for rows of which the
        ranks of one pass hold different copies. The copy that is recorded under the site's name is
        that of the first rank that has the row."""
        other = paired.b.digest[paired.b_at] if which == 0 else paired.a.digest[paired.a_at]
        found: set[int] = set()
        for rank in {0, *paired.copies[which]} if paired.copies[which] else ():
            wrong = introduced & (paired.digest_of(which, rank) != other).any(axis=1)
            if rank == 0 and wrong.any():
                stage = self._stages.get(paired.site.name, [])
                firsts = {
                    min(h.sharing) for h in self._of(paired.number[wrong], index) if h.sharing
                }
                found |= firsts.intersection(stage or firsts) or {min(stage, default=0)}
            elif wrong.any():
                found.add(rank)
        return found


def use_copies(
    values: torch.Tensor, paired: PairedSite, which: int, part: np.ndarray, reader: PassReader
) -> None:
    """Replaces rows of one pass's `values` `[len(part), F]` with a rank's copy where rank 0's copy
    has the bits of the other pass, so that metrics describe the copy that is off."""
    same = paired.recorded_equal[part]
    for rank, copy in paired.copies[which].items():
        here, at = copy.find(paired.number[part])
        kept = copy.rows.shard[at] >= 0
        use = same[here] & kept
        rows = np.flatnonzero(here)[use]
        if len(rows):
            name = copy_name(paired.site.name, rank)
            values[torch.from_numpy(rows)] = reader.values(name, copy.rows, at[use])
