"""Values in place of a log-prob: NaN, infinity, values above 0, sentinels, 0.0, and other
constants.

A 0.0 may be a log-prob: in float32 that of a token that the model is sure of, and in a truncated
distribution that of the only token that is kept. Counts over the whole run show whether a side's
zeros are log-probs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.interval import Floats
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.dumps.sequences import Sequences

Mask = NDArray[np.bool_]
ZERO_BOUNDS = (
    *("missing.zero", "missing.zero-less-sure"),
    *("missing.zero-unsure", "missing.zero-improbable"),
)
"""The thresholds on the other side's log-prob at which a side's zeros are counted."""


def not_finite(values: Floats) -> Mask:
    """Marks NaN and infinite values."""
    return ~np.isfinite(values)


def above_zero(values: Floats, contract: RunContract) -> Mask:
    """Marks finite values that are too large to be a log-prob."""
    largest = contract.threshold("missing.above-zero")
    return np.asarray(np.isfinite(values) & (np.nan_to_num(values) > largest))


def sentinels(values: Floats, contract: RunContract) -> Mask:
    """Marks finite values that are too small to be a log-prob."""
    smallest = contract.threshold("missing.sentinel")
    return np.asarray(np.isfinite(values) & (np.nan_to_num(values) < smallest))


def impossible(values: Floats, contract: RunContract) -> Mask:
    """Marks values that cannot be a log-prob, whatever the other side's value is."""
    return not_finite(values) | above_zero(values, contract) | sentinels(values, contract)


@dataclass
class ZeroCounts:
    """Counts over a run that show whether a side's 0.0 are log-probs."""

    contract: RunContract
    tokens: int = 0
    zeros: tuple[int, ...] = (0,) * len(ZERO_BOUNDS)
    """The number of 0.0 for which the other side's log-prob is below each of ZERO_BOUNDS."""
    nearly: tuple[int, ...] = (0,) * len(ZERO_BOUNDS)
    """The same numbers for log-probs of nearly sure tokens."""
    probable: int = 0
    """Tokens that are probable to the other side, but not certain."""
    probable_zeros: int = 0

    def add(self, side: Floats, other: Floats) -> None:
        """Counts compared tokens, [n]."""
        limit = self.contract.threshold
        bounds = [limit(name) for name in ZERO_BOUNDS]
        with np.errstate(invalid="ignore"):
            nearly = other[(side < 0) & (side > limit("missing.nearly-sure"))]
            probable = side[(other > limit("missing.zero")) & (other < limit("missing.probable"))]
            zeros = other[side == 0]
            self.zeros = _counts_below(bounds, zeros, self.zeros)
            self.nearly = _counts_below(bounds, nearly, self.nearly)
        self.tokens += len(side)
        self.probable += len(probable)
        self.probable_zeros += int((probable == 0).sum())

    @property
    def replace_log_probs(self) -> bool:
        """Whether the 0.0 are in place of log-probs. False if a truncated distribution that keeps
        one token may give them."""
        limit = self.contract.threshold
        zeros, nearly = (dict(zip(ZERO_BOUNDS, x, strict=True)) for x in (self.zeros, self.nearly))
        improbable = zeros["missing.zero-improbable"] > nearly["missing.zero-improbable"]
        # Such a distribution gives the log-prob 0 often, but not if the other side is this unsure.
        unsure = zeros["missing.zero-unsure"] > 1 + nearly["missing.zero-unsure"]
        rare = zeros["missing.zero"] < limit("missing.rare-zeros") * self.tokens and unsure
        # It also gives it to more probable tokens.
        untruncated = (
            self.probable >= limit("missing.probable-tokens")
            and self.probable_zeros <= limit("missing.probable-zeros") * self.probable
        )
        alone = untruncated and any(
            zeros[name] > nearly[name] for name in ("missing.zero", "missing.zero-less-sure")
        )
        return improbable or rare or alone

    @property
    def filled(self) -> int:
        """The number of 0.0 in place of log-probs."""
        return self.zeros[0] if self.replace_log_probs else 0


def _counts_below(bounds: list[float], values: Floats, before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n + int((values < x).sum()) for n, x in zip(before, bounds, strict=True))


def count_zeros(run: Sequences, contract: RunContract) -> tuple[ZeroCounts, ZeroCounts]:
    """Returns the counts of a run's rollout and trainer."""
    both = run.compared
    g, t = run.rollout[both], run.train[both]
    rollout, train = ZeroCounts(contract), ZeroCounts(contract)
    rollout.add(g, t)
    train.add(t, g)
    return rollout, train


def filled_tokens(run: Sequences, zeros: tuple[ZeroCounts, ZeroCounts]) -> tuple[Mask, Mask]:
    """Returns two masks [N] of the compared tokens for which the rollout, and the trainer, has
    another value in place of a log-prob. `zeros` are the counts of the whole run."""
    sides = (run.rollout, run.train), (run.train, run.rollout)
    rollout, train = (_filled(run, *pair, count) for pair, count in zip(sides, zeros, strict=True))
    return rollout, train


def _filled(run: Sequences, side: Floats, other: Floats, zeros: ZeroCounts) -> Mask:
    both, limit = run.compared, zeros.contract.threshold
    not_log_probs = impossible(side, zeros.contract)
    filled = not_log_probs & both
    with np.errstate(invalid="ignore"):
        if zeros.replace_log_probs:
            unexplained = (side == 0) & (other < limit("missing.zero")) & both
            filled |= both & _of_token(run, unexplained, side, other, zeros.contract)
        distant = np.abs(side - other) > limit("missing.constant-apart")
        far = (side < limit("missing.constant-below")) & distant & both & ~not_log_probs
    if far.any():
        # Samples of one prompt may repeat a token with both of its log-probs. If a constant stands
        # in place of log-probs, the other side's log-prob is different each time.
        pairs = np.unique(np.stack([side[far], other[far]]), axis=1)
        values, times = np.unique(pairs[0], return_counts=True)
        share = limit("missing.constant-share") * pairs.shape[1]
        if times.max() >= max(limit("missing.constant-times"), share):
            filled |= both & (side == values[times.argmax()])
    return filled


def _of_token(
    run: Sequences, zeros: Mask, side: Floats, other: Floats, contract: RunContract
) -> Mask:
    """Returns these zeros. If all of them have one token id, the other zeros of that id are added,
    except those at which the other side is sure, too."""
    ids = np.unique(run.token_ids[zeros])
    if len(ids) != 1 or ids[0] < 0 or zeros.sum() < contract.threshold("missing.one-id"):
        return zeros
    unsure = other < contract.threshold("missing.probable")
    return np.asarray((side == 0) & (run.token_ids == ids[0]) & unsure)


def kinds(values: Floats, contract: RunContract) -> Iterator[tuple[str, Mask]]:
    """Yields each kind of value in place of log-probs, with the mask of its tokens, [n]."""
    above = above_zero(values, contract)
    yield "NaN", np.isnan(values)
    yield "infinite", np.isinf(values)
    yield "above 0", above
    for value in np.unique(values[np.isfinite(values) & ~above]):
        yield f"{value:g}", values == value
