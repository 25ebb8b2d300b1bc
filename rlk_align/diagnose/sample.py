"""What is kept of a run that may be larger than memory: exact counts, and a seeded sample."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from rlk_align.dumps.sequences import Sequences, join
from rlk_align.dumps.table import SCHEMA, sequences_of

SAMPLE_TOKENS = 1 << 20
"""Tokens that a sample holds at most, prompts included; a smaller run is held whole."""
EMPTY = sequences_of(pa.RecordBatch.from_pylist([], schema=SCHEMA))
"""A run without a sequence."""
SENTINEL = -1e3
"""Below it no log-prob lies: frameworks write −9999 for what they do not have."""


@dataclass
class Counts:
    """Exact counts over all scored tokens of a run."""

    sequences: int = 0
    scored: int = 0
    missing: int = 0
    """One side or both recorded nothing."""
    compared: int = 0
    not_finite: int = 0
    """NaN or infinite on a side, of the compared."""
    equal: int = 0
    """Bit for bit, of the compared."""
    rollout_zero: int = 0
    train_zero: int = 0

    def add(self, batch: Sequences) -> None:
        """Counts one more batch."""
        both = batch.compared
        rollout, train = batch.rollout[both], batch.train[both]
        self.sequences += len(batch)
        self.scored += int(batch.scored.sum())
        self.compared += len(rollout)
        self.missing += int(batch.scored.sum()) - len(rollout)
        self.not_finite += int((~(np.isfinite(rollout) & np.isfinite(train))).sum())
        self.equal += int((rollout == train).sum())
        self.rollout_zero += int((rollout == 0).sum())
        self.train_zero += int((train == 0).sum())


@dataclass
class RatioSums:
    """Sums over sequences that the mean ratio E[ρ] and its clustered interval follow from."""

    tokens: float = 0.0
    excess: float = 0.0
    """Σ (ρ − 1)."""
    excess2: float = 0.0
    """Σ over sequences of the square of the sequence's Σ (ρ − 1)."""
    excess_tokens: float = 0.0
    tokens2: float = 0.0
    sequences: int = 0

    def add(self, batch: Sequences) -> None:
        """Adds one more batch."""
        usable = batch.compared & np.isfinite(batch.rollout) & np.isfinite(batch.train)
        difference = np.where(usable, batch.train - batch.rollout, 0.0)
        # A ratio beyond e^30 is that of a sentinel, and would overflow a sum.
        excess = np.expm1(np.minimum(difference, 30.0))
        sequence = batch.sequence
        sums = np.bincount(sequence, excess, len(batch))
        counts = np.bincount(sequence, usable, len(batch))
        self.tokens += float(counts.sum())
        self.excess += float(sums.sum())
        self.excess2 += float((sums**2).sum())
        self.excess_tokens += float((sums * counts).sum())
        self.tokens2 += float((counts**2).sum())
        self.sequences += int((counts > 0).sum())


@dataclass
class RunSample:
    """The counts of a whole run and the sequences that were kept of it."""

    counts: Counts = field(default_factory=Counts)
    ratio: RatioSums = field(default_factory=RatioSums)
    kept: Sequences | None = None
    """The sequences that are kept; None where the run has no sequence."""

    @property
    def whole(self) -> bool:
        """Whether every sequence was kept."""
        return self.kept is None or len(self.kept) == self.counts.sequences


def gather(batches: Iterable[Sequences], seed: int = 0, most: int = SAMPLE_TOKENS) -> RunSample:
    """Reads a run once. Every sequence draws a number; those with the smallest numbers are kept, in
    the order of the run, as far as `most` tokens go."""
    draw = np.random.default_rng(seed)
    sample = RunSample()
    parts: list[Sequences] = []
    ranks: list[np.ndarray] = []
    for batch in batches:
        sample.counts.add(batch)
        sample.ratio.add(batch)
        if len(batch):
            parts.append(batch)
            ranks.append(draw.random(len(batch)))
        if sum(p.tokens for p in parts) > 2 * most:
            parts, ranks = _smallest(parts, ranks, most)
    if parts:
        if sum(p.tokens for p in parts) > most:
            parts, ranks = _smallest(parts, ranks, most)
        sample.kept = join(parts)
    return sample


def _smallest(
    parts: list[Sequences], ranks: list[np.ndarray], most: int
) -> tuple[list[Sequences], list[np.ndarray]]:
    whole, rank = join(parts), np.concatenate(ranks)
    order = np.argsort(rank)
    fits = np.cumsum(np.diff(whole.offsets)[order]) <= most
    fits[0] = True
    keep = np.sort(order[fits])
    return [whole.take(keep)], [rank[keep]]
