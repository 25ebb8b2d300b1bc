"""The compared tokens of one training step.

g is the rollout's log-prob of a token, t the trainer's, d = t − g, ρ = exp d, p = exp g.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk_align.interval import Floats
from rlk_align.logs.diagnose.repeats import answers
from rlk_align.logs.dumps.sequences import Sequences


@dataclass(frozen=True)
class Pairs:
    """M tokens of S sequences, one sequence after the other; each has at least one token."""

    g: Floats
    """[M]; the rollout's log-probs in nats."""
    t: Floats
    """[M]; the trainer's."""
    sequence: NDArray[np.int64]
    """[M]; the sequence of each token, from 0 to S − 1."""
    segment: NDArray[np.int64]
    """[M]; the number of each token's segment of scored tokens, such as a turn, from 0."""
    entropy: Floats
    """[M]; the entropy of the trainer's distribution, NaN if it was not recorded."""
    answer: NDArray[np.int64]
    """[S]; the number of each sequence's distinct answer, from 0. An answer that was sampled
    several times counts as one unit of an interval."""

    @cached_property
    def d(self) -> Floats:
        """[M]"""
        with np.errstate(invalid="ignore"):
            return self.t - self.g

    @cached_property
    def ratio(self) -> Floats:
        """[M]; ρ."""
        with np.errstate(over="ignore"):
            return np.exp(self.d)

    @cached_property
    def k3(self) -> Floats:
        """[M]; ρ − 1 − d."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.expm1(self.d) - self.d

    @cached_property
    def q(self) -> Floats:
        """[M]; 1 − p, to which the noise of a log-prob is proportional."""
        return np.maximum(-np.expm1(self.g), 0.0)

    @cached_property
    def counts(self) -> Floats:
        """[S]; tokens of each sequence."""
        return self.sums(np.ones(len(self.g)))

    def sums(self, values: Floats) -> Floats:
        """[S]; the sum of a quantity of the tokens [M] over each sequence."""
        return np.bincount(self.sequence, weights=values).astype(np.float64, copy=False)

    def by_answer(self, values: Floats) -> Floats:
        """The sum of a quantity of the tokens [M] over each distinct answer."""
        return np.bincount(self.answer, weights=self.sums(values)).astype(np.float64, copy=False)

    def means(self, values: Floats) -> Floats:
        """[S]; the mean of a quantity of the tokens [M] over each sequence."""
        return self.sums(values) / self.counts


def pairs_of(sequences: Sequences) -> Pairs:
    """Returns the scored tokens for which both sides recorded a log-prob."""
    compared, sequence = sequences.compared, sequences.sequence
    begins = sequences.scored.copy()
    begins[1:] &= ~sequences.scored[:-1] | (sequence[1:] != sequence[:-1])
    return Pairs(
        g=sequences.rollout[compared],
        t=sequences.train[compared],
        sequence=_from_zero(sequence[compared]),
        segment=_from_zero(np.cumsum(begins, dtype=np.int64)[compared]),
        entropy=sequences.entropy[compared],
        answer=_from_zero(answers(sequences)[np.unique(sequence[compared])]),
    )


def _from_zero(numbers: NDArray[Any]) -> NDArray[np.int64]:
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)
