"""The compared tokens of a sample, in flat arrays that the diagnoses compute with.

g is the rollout's log-prob of a token, t the trainer's, d = t − g, p = exp((g + t)/2) and
q = 1 − p. By the law of healthy noise (`rlk_align.noise`) E|d| is c q at every p, so Σ|d| / Σq
measures the error of a part of the run, whichever tokens are in the part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlk_align.interval import Estimate, Floats, mean_factor, quotient, ratio
from rlk_align.logs.diagnose.contract import DTYPES, Dtype, RunContract
from rlk_align.logs.diagnose.fill_values import Mask, filled_tokens
from rlk_align.logs.diagnose.record import Token
from rlk_align.logs.diagnose.repeats import answers
from rlk_align.logs.diagnose.sample import Counts
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.noise import excess, scaled_errors

Indices = NDArray[np.int64]
C_STATISTIC = "c: mean |Δ| over mean 1 − p"
"""The name of c as a statistic."""
SHOWN = 5
"""Tokens that a diagnosis shows."""
FARTHEST = 20.0
"""In sums, |Δ| counts as this at most, in nats: a larger error is not worse."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A sample of a run, and the values derived from it."""

    run: Sequences
    counts: Counts
    contract: RunContract

    @cached_property
    def filled_sides(self) -> tuple[Mask, Mask]:
        """Two of [N]; compared tokens for which the rollout, and the trainer, has another value in
        place of a log-prob: 0.0, a sentinel, a constant, NaN, infinity, or a value above 0 by more
        than rounding."""
        return filled_tokens(self.run, self.counts.zeros)

    @cached_property
    def filled(self) -> Mask:
        """[N]; compared tokens for which a side has another value in place of a log-prob."""
        rollout, train = self.filled_sides
        return rollout | train

    @cached_property
    def answer(self) -> Indices:
        """[S]; the number of each sequence's distinct answer, from 0."""
        return np.asarray(np.unique(answers(self.run), return_inverse=True)[1])

    @cached_property
    def distinct(self) -> Mask:
        """[S]; the first sequence of each distinct answer."""
        first = np.zeros(len(self.run), dtype=bool)
        first[np.unique(self.answer, return_index=True)[1]] = True
        return first

    @cached_property
    def index(self) -> Indices:
        """[n]; the indices of the tokens that are compared and have log-probs on both sides."""
        return np.flatnonzero(self.run.compared & ~self.filled)

    @cached_property
    def sequence(self) -> Indices:
        """[n]"""
        return self.run.sequence[self.index]

    @cached_property
    def position(self) -> Indices:
        """[n]; the position of each token in its sequence."""
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
    def log_kept(self) -> Floats:
        """[n]; the logarithm of the kept mass, NaN where the dump does not record it."""
        mass = self.run.kept_mass[self.index]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((mass > 0) & (mass <= 1), np.log(mass), np.nan)

    @cached_property
    def size(self) -> Floats:
        """[n]; |d|, at most FARTHEST."""
        return np.minimum(np.abs(self.d), FARTHEST)

    @cached_property
    def q(self) -> Floats:
        """[n]; 1 − exp((g + t)/2)."""
        return np.maximum(-np.expm1((self.g + self.t) / 2), 0.0)

    @cached_property
    def scaled(self) -> Floats:
        """[n]; |d| / q; NaN for tokens whose q is too small."""
        smallest = self.contract.threshold("noise.token-q")
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.q >= smallest, self.size / self.q, np.nan)

    def excess(self, floor: float) -> Floats:
        """[n]; |d| / q in multiples of c, which counts as `floor` where it is less or unknown."""
        scaled = scaled_errors(self.size, self.q, self.contract.threshold("noise.token-q"))
        # c is unknown if both sides are sure of every token.
        return excess(scaled, float(np.nan_to_num(self.c().value)), floor)

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
        """[n]; the number of each token's segment in its sequence, from 0."""
        number = np.cumsum(self.first_of_segment)[self.index]
        lowest = np.full(len(self.run), np.iinfo(np.int64).max)
        np.minimum.at(lowest, self.sequence, number)
        return np.asarray(number - lowest[self.sequence])

    @cached_property
    def dtype(self) -> Dtype:
        """The lower precision of the two sides; bfloat16 if a sequence states no known dtype."""
        names = {*self.run.rollout_dtypes, *self.run.train_dtypes}
        known = [d for d in DTYPES if d in names]
        return known[0] if known and names <= set(DTYPES) else "bfloat16"

    def sums(self, values: Floats, where: Mask | None = None) -> Floats:
        """[S]; the sums over the tokens of each sequence."""
        weights = values if where is None else np.where(where, values, 0.0)
        return np.bincount(self.sequence, weights, len(self.run)).astype(np.float64)

    def share(self, values: Floats, of: Floats) -> Estimate:
        """Σ values / Σ of, both [n], with an interval that is clustered by distinct answer."""
        return ratio(self.by_answer(self.sums(values)), self.by_answer(self.sums(of)))

    def by_answer(self, sums: Floats) -> Floats:
        """The sums of each distinct answer from the sums of each sequence, [S]. An answer that was
        sampled several times counts as one unit of an interval."""
        return np.bincount(self.answer, sums).astype(np.float64)

    def noise(self, where: Mask | None = None) -> tuple[Floats, Floats]:
        """[S], [S]; Σ|d| and Σq of each sequence, whose ratio is c."""
        return self.sums(self.size, where), self.sums(self.q, where)

    def _noise_of_answers(self, where: Mask | None = None) -> tuple[Floats, Floats]:
        sizes, qs = self.noise(where)
        return self.by_answer(sizes), self.by_answer(qs)

    def c(self, where: Mask | None = None) -> Estimate:
        """c of a part of the run."""
        estimate = ratio(*self._noise_of_answers(where))
        return Estimate(estimate.value, max(estimate.low, 0.0), estimate.high)

    def between(self, a: Mask, b: Mask) -> Estimate:
        """By which factor c of tokens a, in a typical sequence, exceeds c of tokens b in
        another."""
        return self._contrast(a, b, lambda x, y: mean_factor(x[~np.isnan(x)], y[~np.isnan(y)]))

    def within(self, a: Mask, b: Mask) -> Estimate:
        """By which factor c of tokens a typically exceeds c of tokens b in the same sequence."""

        def paired(x: Floats, y: Floats) -> Estimate:
            return mean_factor((x - y)[~np.isnan(x - y)])

        return self._contrast(a, b, paired)

    def pooled(self, a: Mask, b: Mask) -> Estimate:
        """c of a over c of b, over all sequences, for tokens that are rare in a sequence."""
        return self._contrast(
            a, b, lambda _x, _y: quotient(self._noise_of_answers(a), self._noise_of_answers(b))
        )

    def _contrast(self, a: Mask, b: Mask, how: Callable[[Floats, Floats], Estimate]) -> Estimate:
        """The estimate of `how`; 1 if c of a is negligible."""
        if self.c(a).value <= self.contract.limit("numerics", "negligible"):
            return Estimate(1.0, 0.0, 1.0)
        return how(self._logs(a), self._logs(b))

    def _logs(self, where: Mask) -> Floats:
        """The logarithm of c of each distinct answer, NaN if it has too few such tokens."""
        smallest = self.contract.threshold("noise.part-q")
        return log_c(*self._noise_of_answers(where), smallest)

    @cached_property
    def outliers(self) -> Mask:
        """[S]; sequences that are far worse than the median sequence of their step."""
        limit = self.contract.threshold
        smallest, factor = limit("noise.sequence-q"), limit("outlier.factor")
        size, q = self.noise()
        largest = np.zeros(len(size))
        np.maximum.at(largest, self.sequence, self.size)
        # One bad token does not make a sequence an outlier.
        size -= largest
        enough = q >= smallest
        c = np.where(enough, size / np.maximum(q, smallest), np.nan)
        outlying = np.zeros(len(c), dtype=bool)
        good = float(np.quantile(c[enough], 0.25)) if enough.any() else np.nan
        for step in np.unique(self.run.steps):
            of_step = (self.run.steps == step) & enough
            if of_step.any():
                # If most sequences of a step are broken, their median is no reference.
                highest = limit("outlier.quarter-factor") * good
                usual = min(float(np.median(c[of_step])), highest)
                outlying |= of_step & (c > factor * usual)
        outlying &= c > self.contract.limit("numerics", "negligible")
        return outlying & self._throughout(~outlying)

    def _throughout(self, good: Mask) -> Mask:
        """[S]; whether many tokens of a sequence are worse than those of good sequences."""
        limit = self.contract.threshold
        known = np.isfinite(self.scaled)
        of_good = self.scaled[known & good[self.sequence]]
        usual = float(np.median(of_good)) if len(of_good) else 0.0
        bad = known & (np.where(known, self.scaled, 0.0) > limit("outlier.token-factor") * usual)
        least = limit("outlier.tokens") * self.sums(known.astype(float))
        return self.sums(bad.astype(float)) > least

    @cached_property
    def usual(self) -> Mask:
        """[n]; tokens of sequences that are not outliers."""
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
            if len(picked) == SHOWN:
                break
        return self.tokens(self.index[picked])

    def tokens(self, indices: Indices) -> list[Token]:
        """The records of tokens, by their indices in the run's arrays."""
        run, shown = self.run, indices[:SHOWN]
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


def log_c(sizes: Floats, qs: Floats, smallest: float) -> Floats:
    """log(Σ|d| / Σq), elementwise; NaN where Σq is below `smallest` or Σ|d| is 0."""
    known = (qs >= smallest) & (sizes > 0)
    return np.log(np.where(known, sizes, np.nan) / np.where(known, qs, 1.0))


def _value(value: float, missing: bool) -> float | None:
    return None if missing else float(value)
