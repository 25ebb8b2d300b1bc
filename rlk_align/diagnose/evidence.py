"""What diagnoses compute on: the compared tokens of a sample, in flat arrays.

g is the rollout's log-prob of a token, t the trainer's, d = t − g, p = exp((g + t)/2) and
q = 1 − p. Healthy numerics make E|d| = c q at every p, so sums of |d| over sums of q tell how bad a
part of the run is, whichever tokens are in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlk_align.diagnose.contract import DTYPES, Dtype, RunContract
from rlk_align.diagnose.interval import Estimate, Floats, mean_factor, quotient, ratio
from rlk_align.diagnose.record import Token
from rlk_align.diagnose.sample import SENTINEL, Counts
from rlk_align.dumps.sequences import Sequences

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]
_SHOWN = 5
"""Tokens that a diagnosis shows."""
_ZERO_WHILE = -0.05
"""The other side's log-prob below which a 0.0 is not genuine."""
_SURE = -1.5
"""Below it not even a truncated law gives the token the probability 1."""
_UNSURE = -0.5
"""Below it a law that keeps only the most probable token is cut at less than 0.61 of its mass."""
_RARE = 0.005
"""A truncated law that is cut so low gives more than this share of its tokens the log-prob 0."""
_LESS_SURE = -0.2
"""Where a 0.0 is not of a truncated law, it is no log-prob below this one of the other side."""
_PROBABLE, _ENOUGH_PROBABLE, _ZERO_PART = -0.002, 20, 0.1
"""A truncated law that gives a token with the log-prob _ZERO_WHILE a 0 gives it to more than this
part of the tokens from there to _PROBABLE, where there are enough of them."""
_BY_CHANCE = 1e-5
"""The part of all tokens that a route through the model may throw from log-prob 0 to _LESS_SURE."""
_OUTLIER = 6.0
"""A sequence this many times worse than the median one of its step is an outlier."""
_MOST = 0.4
"""In a broken sequence, more than this share of the tokens is 3 times worse than the median
token."""
_ENOUGH = 5.0
"""Σ q below which a sequence is too sure of itself to have an error of its own."""

_PART = 1.0
"""Σ q below which a part of a sequence is too sure of itself to have an error of its own."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A sample of a run and what is derived from it."""

    run: Sequences
    counts: Counts
    contract: RunContract

    @cached_property
    def filled(self) -> Mask:
        """[N]; compared tokens whose log-prob is not one: a 0.0, a sentinel or a constant in
        its place, NaN, infinite, or above 0 by more than rounding."""
        both = self.run.compared
        g, t = self.run.rollout, self.run.train
        found = np.zeros(len(g), dtype=bool)
        for side, other in ((g, t), (t, g)):
            with np.errstate(invalid="ignore"):
                wild = ~np.isfinite(side) | (side < SENTINEL) | (side > 1e-3)
                far = (side < -3) & (np.abs(side - other) > 1) & both & ~wild
            found |= wild
            zeros = _zero_fill(side[both], other[both])
            found[np.flatnonzero(both)[zeros]] = True
            if far.any():
                # Samples of one prompt repeat a token with both of its log-probs; what stands in
                # the place of a log-prob meets a different one each time.
                pairs = np.unique(np.stack([side[far], other[far]]), axis=1)
                values, times = np.unique(pairs[0], return_counts=True)
                if times.max() >= max(3, 0.1 * pairs.shape[1]):
                    found |= side == values[times.argmax()]
        return found & both

    @cached_property
    def index(self) -> Indices:
        """[n]; the places of the tokens that are compared and have log-probs on both sides."""
        return np.flatnonzero(self.run.compared & ~self.filled)

    @cached_property
    def sequence(self) -> Indices:
        """[n]"""
        return self.run.sequence[self.index]

    @cached_property
    def position(self) -> Indices:
        """[n]; the place of each token in its sequence."""
        return self.run.position[self.index]

    @cached_property
    def g(self) -> Floats:
        """[n]; the rollout's log-probs."""
        return self.run.rollout[self.index]

    @cached_property
    def t(self) -> Floats:
        """[n]; the trainer's log-probs."""
        return self.run.train[self.index]

    @cached_property
    def d(self) -> Floats:
        """[n]; t − g."""
        return self.t - self.g

    @cached_property
    def size(self) -> Floats:
        """[n]; |d|, at most 20: what is farther off is as wrong."""
        return np.minimum(np.abs(self.d), 20.0)

    @cached_property
    def q(self) -> Floats:
        """[n]; 1 − exp((g + t)/2)."""
        return np.maximum(-np.expm1((self.g + self.t) / 2), 0.0)

    @cached_property
    def scaled(self) -> Floats:
        """[n]; |d| / q; NaN for tokens that are too sure (q < 0.01) to have one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.q >= 0.01, self.size / self.q, np.nan)

    @cached_property
    def steps(self) -> Indices:
        """[n]; the step of each token."""
        return self.run.steps[self.sequence]

    @cached_property
    def first_of_segment(self) -> Mask:
        """[N]; scored tokens without a scored one before them in their sequence."""
        scored = self.run.scored
        before = np.concatenate([[False], scored[:-1]])
        before[self.run.offsets[:-1][np.diff(self.run.offsets) > 0]] = False
        return scored & ~before

    @cached_property
    def segment(self) -> Indices:
        """[n]; the place of each token's segment in its sequence, from 0."""
        number = np.cumsum(self.first_of_segment)[self.index]
        lowest = np.full(len(self.run), np.iinfo(np.int64).max)
        np.minimum.at(lowest, self.sequence, number)
        return np.asarray(number - lowest[self.sequence])

    @cached_property
    def dtype(self) -> Dtype:
        """The lower precision of the two sides; a sequence's side that names none that is known
        counts as bfloat16."""
        names = {*self.run.rollout_dtypes, *self.run.train_dtypes}
        known = [d for d in DTYPES if d in names]
        return known[0] if known and names <= set(DTYPES) else "bfloat16"

    def sums(self, values: Floats, where: Mask | None = None) -> Floats:
        """[S]; the sums over the tokens of each sequence."""
        weights = values if where is None else np.where(where, values, 0.0)
        return np.bincount(self.sequence, weights, len(self.run)).astype(np.float64)

    def noise(self, where: Mask | None = None) -> tuple[Floats, Floats]:
        """[S], [S]; Σ|d| and Σq of each sequence, whose ratio is c."""
        return self.sums(self.size, where), self.sums(self.q, where)

    def c(self, where: Mask | None = None) -> Estimate:
        """How bad a part of the run is, for its 1 − p."""
        estimate = ratio(*self.noise(where))
        return Estimate(estimate.value, max(estimate.low, 0.0), estimate.high)

    def between(self, a: Mask, b: Mask) -> Estimate:
        """How many times worse the typical sequence of tokens a is than that of tokens b."""
        return self._contrast(a, b, lambda x, y: mean_factor(x[~np.isnan(x)], y[~np.isnan(y)]))

    def within(self, a: Mask, b: Mask) -> Estimate:
        """How many times worse tokens a are than tokens b of the same sequence, typically."""

        def paired(x: Floats, y: Floats) -> Estimate:
            return mean_factor((x - y)[~np.isnan(x - y)])

        return self._contrast(a, b, paired)

    def pooled(self, a: Mask, b: Mask) -> Estimate:
        """c of a over c of b, over all sequences: for tokens of which a sequence has few."""
        return self._contrast(a, b, lambda _x, _y: quotient(self.noise(a), self.noise(b)))

    def _contrast(self, a: Mask, b: Mask, how: Callable[[Floats, Floats], Estimate]) -> Estimate:
        """Where c of a is negligible, it is no worse than that of b."""
        if self.c(a).value <= self.contract.limit("numerics", "negligible"):
            return Estimate(1.0, 0.0, 1.0)
        return how(self._logs(a), self._logs(b))

    def _logs(self, where: Mask) -> Floats:
        """[S]; the logarithm of c of each sequence, NaN where it has too few such tokens."""
        sizes, qs = self.noise(where)
        known = (qs >= _PART) & (sizes > 0)
        return np.log(np.where(known, sizes, np.nan) / np.where(known, qs, 1.0))

    @cached_property
    def outliers(self) -> Mask:
        """[S]; sequences that are far worse than the median one of their step."""
        size, q = self.noise()
        largest = np.zeros(len(size))
        np.maximum.at(largest, self.sequence, self.size)
        # One token alone makes no broken sequence.
        size -= largest
        enough = q >= _ENOUGH
        c = np.where(enough, size / np.maximum(q, _ENOUGH), np.nan)
        found = np.zeros(len(c), dtype=bool)
        good = float(np.quantile(c[enough], 0.25)) if enough.any() else np.nan
        for step in np.unique(self.run.steps):
            of_step = (self.run.steps == step) & enough
            if of_step.any():
                # A step whose sequences are mostly broken is no measure.
                usual = min(float(np.median(c[of_step])), 2.5 * good)
                found |= of_step & (c > _OUTLIER * usual)
        found &= c > self.contract.limit("numerics", "negligible")
        return found & self._throughout(~found)

    def _throughout(self, good: Mask) -> Mask:
        """[S]; whether more than a few tokens of a sequence are worse than those of good ones."""
        known = np.isfinite(self.scaled)
        of_good = self.scaled[known & good[self.sequence]]
        usual = float(np.median(of_good)) if len(of_good) else 0.0
        wide = known & (np.where(known, self.scaled, 0.0) > 3 * usual)
        return self.sums(wide.astype(float)) > _MOST * self.sums(known.astype(float))

    @cached_property
    def usual(self) -> Mask:
        """[n]; tokens of sequences that are no outliers."""
        return ~self.outliers[self.sequence]

    def worst(self, score: Floats, where: Mask | None = None) -> list[Token]:
        """The compared tokens with the highest scores, [n], at most two of a sequence."""
        order = np.argsort(-np.where(True if where is None else where, score, -np.inf))
        picked: list[int] = []
        for k in order[:200]:
            mine = [j for j in picked if self.sequence[j] == self.sequence[k]]
            allowed = where is None or where[k]
            if len(mine) < 2 and allowed and np.isfinite(score[k]):
                picked.append(int(k))
            if len(picked) == _SHOWN:
                break
        return self.tokens(self.index[picked])

    def tokens(self, places: Indices) -> list[Token]:
        """The records of tokens, by their places in the run's arrays."""
        run, shown = self.run, places[:_SHOWN]
        sequences = np.searchsorted(run.offsets, shown, side="right") - 1
        return [
            Token(
                id=run.ids[s],
                position=int(i - run.offsets[s]),
                token=int(run.token_ids[i]),
                rollout=_value(run.rollout[i], bool(run.rollout_missing[i])),
                train=_value(run.train[i], bool(run.train_missing[i])),
            )
            for i, s in zip(shown, sequences, strict=True)
        ]


def _zero_fill(side: Floats, other: Floats) -> Mask:
    """Which 0.0 of the compared tokens, [n], stand instead of a log-prob; all False where they
    may be of a truncated law that keeps one token, to which it gives the log-prob 0."""
    zeros = (side == 0) & (other < _ZERO_WHILE)
    # Tokens of which both sides say a log-prob, and one is wild; they may be 0 by chance too.
    nearly = other[(side < 0) & (side > -0.01)]
    sure = (other[zeros] < _SURE).sum() > (nearly < _SURE).sum()
    # Such a law gives the log-prob 0 often, and never where the other side is this unsure.
    unsure = (other[zeros] < _UNSURE).sum() > 1 + (nearly < _UNSURE).sum()
    rare = zeros.sum() < _RARE * len(side) and unsure
    # And it gives it to the more probable tokens too.
    probable = side[(other > _ZERO_WHILE) & (other < _PROBABLE)]
    alone = len(probable) >= _ENOUGH_PROBABLE and (probable == 0).mean() <= _ZERO_PART
    chance = (nearly < _LESS_SURE).sum() + _BY_CHANCE * len(side)
    alone = alone and (other[zeros] < _LESS_SURE).sum() > chance
    return zeros if sure or rare or alone else np.zeros(len(side), dtype=bool)


def _value(value: float, missing: bool) -> float | None:
    return None if missing else float(value)
