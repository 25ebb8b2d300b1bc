"""What stands in place of a log-prob: NaN, an infinite value, one above 0, a sentinel, a 0.0, or
another constant.

A 0.0 may be genuine: float32 gives it to a token that the model is sure of, and a truncated law to
one that it keeps alone. Which of them a side's zeros are is told by counts over the whole run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.interval import Floats
from rlk_align.logs.dumps.sequences import Sequences

Mask = NDArray[np.bool_]
SENTINEL = -1e3
"""Below it no log-prob lies: frameworks write −9999 for what they do not have."""
_ROUNDING = 1e-3
"""Above it a log-prob is no probability's, however it was rounded."""
_ZERO_WHILE = -0.05
"""The other side's log-prob below which a 0.0 is not genuine."""
_SURE = -1.5
"""Below it not even a truncated law gives the token the probability 1."""
_UNSURE = -0.5
"""Below it a law that keeps only the most probable token is cut at less than 0.61 of its mass."""
_RARE = 0.005
"""A truncated law that is cut so low gives more than this share of its tokens the log-prob 0."""
_LESS_SURE = -0.2
"""Noise throws fewer tokens that are nearly sure below it than below _ZERO_WHILE."""
_NEARLY = -0.01
"""A side is nearly sure of tokens above it. As few of them as of zeros are far off for the other
side where nothing but noise, or an expert that is chosen differently, throws tokens."""
_BOUNDS = (_ZERO_WHILE, _LESS_SURE, _UNSURE, _SURE)
_PROBABLE, _ENOUGH_PROBABLE, _ZERO_PART = -0.002, 20, 0.1
"""A truncated law that gives a token with the log-prob _ZERO_WHILE a 0 gives it to more than this
part of the tokens from there to _PROBABLE, where there are enough of them."""


def not_finite(values: Floats) -> Mask:
    """NaN and infinite values."""
    return ~np.isfinite(values)


def above_zero(values: Floats) -> Mask:
    """Values that are no probability's logarithm; NaN and infinite ones aside."""
    return np.asarray(np.isfinite(values) & (np.nan_to_num(values) > _ROUNDING))


def sentinels(values: Floats) -> Mask:
    """Values that are too small to be a log-prob; NaN and infinite ones aside."""
    return np.asarray(np.isfinite(values) & (np.nan_to_num(values) < SENTINEL))


def impossible(values: Floats) -> Mask:
    """Values that are no log-prob whatever the other side says."""
    return not_finite(values) | above_zero(values) | sentinels(values)


@dataclass
class ZeroCounts:
    """What tells whether a side's 0.0 stand in place of log-probs, counted over a run."""

    tokens: int = 0
    zeros: tuple[int, ...] = (0,) * len(_BOUNDS)
    """0.0 where the other side's log-prob is below each of _BOUNDS."""
    nearly: tuple[int, ...] = (0,) * len(_BOUNDS)
    """Log-probs of nearly sure tokens, likewise."""
    probable: int = 0
    """Tokens that the other side finds probable, and is not sure of."""
    probable_zeros: int = 0

    def add(self, side: Floats, other: Floats) -> None:
        """Counts compared tokens, [n]."""
        with np.errstate(invalid="ignore"):
            nearly = other[(side < 0) & (side > _NEARLY)]
            probable = side[(other > _ZERO_WHILE) & (other < _PROBABLE)]
            zeros = other[side == 0]
            self.zeros = _added(self.zeros, zeros)
            self.nearly = _added(self.nearly, nearly)
        self.tokens += len(side)
        self.probable += len(probable)
        self.probable_zeros += int((probable == 0).sum())

    @property
    def stand_instead(self) -> bool:
        """Whether the 0.0 stand in place of log-probs; False where a truncated law that keeps one
        token may have given them."""
        zeros, nearly = (dict(zip(_BOUNDS, x, strict=True)) for x in (self.zeros, self.nearly))
        sure = zeros[_SURE] > nearly[_SURE]
        # Such a law gives the log-prob 0 often, and never where the other side is this unsure.
        unsure = zeros[_UNSURE] > 1 + nearly[_UNSURE]
        rare = zeros[_ZERO_WHILE] < _RARE * self.tokens and unsure
        # And it gives it to the more probable tokens too.
        untruncated = (
            self.probable >= _ENOUGH_PROBABLE and self.probable_zeros <= _ZERO_PART * self.probable
        )
        alone = untruncated and any(zeros[x] > nearly[x] for x in (_ZERO_WHILE, _LESS_SURE))
        return sure or rare or alone

    @property
    def filled(self) -> int:
        """How many 0.0 stand in place of log-probs."""
        return self.zeros[0] if self.stand_instead else 0


def _added(counts: tuple[int, ...], others: Floats) -> tuple[int, ...]:
    return tuple(n + int((others < x).sum()) for n, x in zip(counts, _BOUNDS, strict=True))


def zeros_of(run: Sequences) -> tuple[ZeroCounts, ZeroCounts]:
    """The counts of a run's rollout and of its trainer."""
    both = run.compared
    g, t = run.rollout[both], run.train[both]
    rollout, train = ZeroCounts(), ZeroCounts()
    rollout.add(g, t)
    train.add(t, g)
    return rollout, train


def filled_places(run: Sequences, zeros: tuple[ZeroCounts, ZeroCounts]) -> tuple[Mask, Mask]:
    """Two of [N]: compared tokens of which the rollout, and the trainer, has something else in
    place of a log-prob. `zeros` are the counts of the whole run."""
    sides = (run.rollout, run.train), (run.train, run.rollout)
    found = [_filled(run, *pair, count) for pair, count in zip(sides, zeros, strict=True)]
    return found[0], found[1]


def _filled(run: Sequences, side: Floats, other: Floats, zeros: ZeroCounts) -> Mask:
    both = run.compared
    wild = impossible(side)
    found = wild & both
    with np.errstate(invalid="ignore"):
        if zeros.stand_instead:
            found |= both & _of_token(run, (side == 0) & (other < _ZERO_WHILE) & both, side, other)
        far = (side < -3) & (np.abs(side - other) > 1) & both & ~wild
    if far.any():
        # Samples of one prompt repeat a token with both of its log-probs; what stands in the place
        # of a log-prob meets a different one each time.
        pairs = np.unique(np.stack([side[far], other[far]]), axis=1)
        values, times = np.unique(pairs[0], return_counts=True)
        if times.max() >= max(3, 0.1 * pairs.shape[1]):
            found |= both & (side == values[times.argmax()])
    return found


def _of_token(run: Sequences, zeros: Mask, side: Floats, other: Floats) -> Mask:
    """These zeros; where all are of one token id, the others of that id too that the other side is
    not as sure of."""
    ids = np.unique(run.token_ids[zeros])
    if len(ids) != 1 or ids[0] < 0 or zeros.sum() < 3:
        return zeros
    return np.asarray((side == 0) & (run.token_ids == ids[0]) & (other < _PROBABLE))


def kinds(values: Floats) -> Iterator[tuple[str, Mask]]:
    """Yields what stands in place of log-probs, [n], in words, each with where it does."""
    yield "NaN", np.isnan(values)
    yield "infinite", np.isinf(values)
    yield "above 0", above_zero(values)
    rest = np.isfinite(values) & ~above_zero(values)
    for value in np.unique(values[rest]):
        yield f"{value:g}", values == value
