"""The pattern of an error: everywhere or in one head, channel, feature, token, position or row, and
scaled, shifted or scattered. N = rows, F = features."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlk_align.results import ErrorPattern

NAMED_SHARE = 0.8
"""A place is named if it has at least this share of the error beyond rounding."""
EXPLAINED_SHARE = 0.6
"""A place is called scaled or shifted if that explains at least this share of its squared error."""
ROUNDING = 3.0
"""A squared error up to this many times the median counts as rounding."""

Place = Literal["everywhere", "head", "channel", "feature", "token", "position", "row"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the entries of each row, `[N]`, or of each feature, `[F]`, of these figures."""

    square: np.ndarray
    """The squared error."""
    variance: np.ndarray
    """The variance of a rounding."""
    product: np.ndarray
    """The error times the exact output."""
    power: np.ndarray
    """The squared exact output."""

    @property
    def excess(self) -> np.ndarray:
        """The squared error beyond rounding, in units, so that large rows and features weigh no
        more than others. If there are NaN or infinities, only they count."""
        broken = ~np.isfinite(self.square)
        if broken.any():
            return broken.astype(np.float64)
        ratio = self.square / self.variance
        typical = np.clip(np.median(ratio), 1e-3, 1.0)
        return np.clip(ratio - ROUNDING * typical, 0, None)

    def gain(self, chosen: np.ndarray) -> tuple[float, float]:
        """The regression of the error on the exact output, over the chosen entries, and the share
        of their squared error that it explains."""
        product, power = self.product[chosen].sum(), self.power[chosen].sum()
        square = self.square[chosen].sum()
        if not (power > 0 and 0 < square < np.inf):
            return 0.0, 0.0
        return float(product / power), float(product**2 / power / square)


@dataclass(frozen=True, slots=True)
class RowLabels:
    """The number, token id and position of each row, int `[N]` each."""

    number: np.ndarray
    token: np.ndarray
    position: np.ndarray


def pattern(
    rows: Totals,
    features: Totals,
    which: RowLabels,
    heads: int,
    shift: np.ndarray,
    scaled_by_row: float,
) -> ErrorPattern:
    """Returns the pattern of an error. `shift`: the mean error of each feature, `[F]`;
    `scaled_by_row`: the squared error that a gain of each row, in each head, explains."""
    for place, totals, label in _candidates(rows, features, which, heads):
        at = _dominant_label(totals.excess, label)
        if at is None:
            continue
        gain, explained = totals.gain(label == at)
        constant = len(rows.square) * float(shift[at]) ** 2 if place == "feature" else 0.0
        if constant > max(explained, EXPLAINED_SHARE) * totals.square[label == at].sum():
            return _of(place, at, "shifted", float(shift[at]))
        if explained >= EXPLAINED_SHARE:
            return _of(place, at, "scaled", gain)
        return _of(place, at, "scattered", 0.0)
    everything = np.ones(len(rows.square), dtype=bool)
    gain, explained = rows.gain(everything)
    square, power = float(rows.square.sum()), float(rows.power.sum())
    if explained >= EXPLAINED_SHARE:
        return _of("everywhere", 0, "scaled", gain)
    if square > 0 and scaled_by_row >= EXPLAINED_SHARE * square:
        return _of("everywhere", 0, "rows scaled", float(np.sqrt(scaled_by_row / power)))
    return _of("everywhere", 0, "scattered", 0.0)


def _candidates(
    rows: Totals, features: Totals, which: RowLabels, heads: int
) -> Iterator[tuple[Place, Totals, np.ndarray]]:
    """Yields the kinds of places, the smallest first."""
    yield "row", rows, which.number
    yield "token", rows, which.token
    yield "position", rows, which.position
    feature = np.arange(len(features.square))
    width = len(feature) // heads
    yield "feature", features, feature
    if heads > 1:
        yield "channel", features, feature % width
        yield "head", features, feature // width


def _dominant_label(excess: np.ndarray, label: np.ndarray) -> int | None:
    """The label with most of the excess; None if no label has it, or if there is only one label."""
    labels, inverse = np.unique(label, return_inverse=True)
    if len(labels) < 2 or not excess.sum() > 0:
        return None
    share = np.bincount(inverse, excess / excess.sum())
    return int(labels[share.argmax()]) if share.max() >= NAMED_SHARE else None


def _of(
    place: Place,
    at: int,
    manner: Literal["scaled", "shifted", "rows scaled", "scattered"],
    amount: float,
) -> ErrorPattern:
    return ErrorPattern(place=place, at=at, manner=manner, amount=amount)
