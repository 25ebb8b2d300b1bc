"""Reduces a run, which may be larger than memory, to exact counts and a seeded sample."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlk_align.interval import Floats
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.diagnose.fill_values import ZeroCounts, above_zero, not_finite, sentinels
from rlk_align.logs.diagnose.repeats import answers
from rlk_align.logs.dumps.sequences import Sequences, join
from rlk_align.logs.dumps.table import SCHEMA, sequences_of

SAMPLE_TOKENS = 1 << 20
"""The largest number of tokens in a sample, prompts included. A smaller run is not sampled."""
EMPTY = sequences_of(pa.RecordBatch.from_pylist([], schema=SCHEMA))
"""A run without sequences."""


@dataclass
class Counts:
    """Exact counts over all scored tokens of a run."""

    contract: RunContract
    sequences: int = 0
    scored: int = 0
    missing: int = 0
    """Scored tokens without a log-prob on one side or on both."""
    compared: int = 0
    not_finite: int = 0
    """Compared tokens with a NaN or an infinite value on a side."""
    impossible: int = 0
    """Compared tokens with a NaN, an infinite value or a sentinel on a side."""
    rollout_above_zero: int = 0
    """Compared tokens whose log-prob is above 0 by more than rounding."""
    train_above_zero: int = 0
    equal: int = 0
    """Compared tokens whose log-probs are equal bit for bit."""
    rollout_zero: int = 0
    train_zero: int = 0
    zeros: tuple[ZeroCounts, ZeroCounts] = field(init=False)
    """Of the rollout and of the trainer: whether their 0.0 are log-probs."""

    def __post_init__(self) -> None:
        self.zeros = ZeroCounts(self.contract), ZeroCounts(self.contract)

    @property
    def filled(self) -> int:
        """A lower bound of the number of compared tokens with another value in place of a
        log-prob."""
        return max(self.impossible, *(side.filled for side in self.zeros))

    def add(self, batch: Sequences) -> None:
        """Counts one more batch."""
        both = batch.compared
        rollout, train = batch.rollout[both], batch.train[both]
        self.sequences += len(batch)
        self.scored += int(batch.scored.sum())
        self.compared += len(rollout)
        self.missing += int(batch.scored.sum()) - len(rollout)
        self.not_finite += int((not_finite(rollout) | not_finite(train)).sum())
        not_log_probs = [not_finite(x) | sentinels(x, self.contract) for x in (rollout, train)]
        self.impossible += int((not_log_probs[0] | not_log_probs[1]).sum())
        self.rollout_above_zero += int(above_zero(rollout, self.contract).sum())
        self.train_above_zero += int(above_zero(train, self.contract).sum())
        self.zeros[0].add(rollout, train)
        self.zeros[1].add(train, rollout)
        self.equal += int((rollout == train).sum())
        self.rollout_zero += int((rollout == 0).sum())
        self.train_zero += int((train == 0).sum())


@dataclass
class RatioSums:
    """Sums for the mean ratio E[ρ] and its interval, which is clustered by answer, because a
    repeated answer adds no information."""

    answers: list[NDArray[np.uint64]] = field(default_factory=list)
    """For each batch, the number of each sequence's answer."""
    excess: list[NDArray[np.float64]] = field(default_factory=list)
    """For each batch, Σ (ρ − 1) of each sequence."""
    tokens: list[NDArray[np.float64]] = field(default_factory=list)
    """For each batch, the number of tokens of each sequence in that sum."""

    def add(self, batch: Sequences) -> None:
        """Adds one more batch."""
        usable = batch.compared & np.isfinite(batch.rollout) & np.isfinite(batch.train)
        difference = np.where(usable, batch.train - batch.rollout, 0.0)
        # A ratio beyond e^30 comes from a sentinel, and would overflow the sum.
        excess = np.expm1(np.minimum(difference, 30.0))
        sequence = batch.sequence
        self.answers.append(answers(batch))
        self.excess.append(np.bincount(sequence, excess, len(batch)).astype(np.float64))
        self.tokens.append(np.bincount(sequence, usable, len(batch)).astype(np.float64))

    def by_answer(self) -> tuple[Floats, Floats]:
        """Returns Σ (ρ − 1) and the number of tokens of each distinct answer with any."""
        if not self.answers:
            return np.zeros(0), np.zeros(0)
        number = np.unique(np.concatenate(self.answers), return_inverse=True)[1]
        excess: Floats = np.bincount(number, np.concatenate(self.excess)).astype(np.float64)
        tokens: Floats = np.bincount(number, np.concatenate(self.tokens)).astype(np.float64)
        return excess[tokens > 0], tokens[tokens > 0]


@dataclass
class RunSample:
    """The counts of a whole run, and a sample of its sequences."""

    counts: Counts
    ratio: RatioSums = field(default_factory=RatioSums)
    kept: Sequences | None = None
    """The sampled sequences; None if the run has no sequence."""

    @property
    def whole(self) -> bool:
        """Whether every sequence is in the sample."""
        return self.kept is None or len(self.kept) == self.counts.sequences


def gather(
    batches: Iterable[Sequences],
    contract: RunContract,
    seed: int = 0,
    most: int = SAMPLE_TOKENS,
) -> RunSample:
    """Reads a run once, and samples its sequences. Each sequence gets a random number, and those
    with the smallest numbers are kept in the order of the run, up to `most` tokens."""
    draw = np.random.default_rng(seed)
    sample = RunSample(Counts(contract))
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
