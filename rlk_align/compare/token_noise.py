"""The noise of an edge's sampled tokens, by the law of healthy noise (`rlk_align.noise`)."""

import numpy as np

from rlk_align.interval import Estimate, Floats, ratio
from rlk_align.noise import scaled_errors
from rlk_align.results import TokenNoise

LEAST_ROOM = 0.01
"""The smallest 1 − p that an error is divided by: below it a token is almost certain."""


def token_noise(first: Floats, second: Floats, sequence: np.ndarray) -> TokenNoise:
    """Fits the law to `first` and `second`, log-probs of the same sampled tokens, float64 `[N]`, in
    nats. `sequence`: the number of each token's sequence, int `[N]`. A figure that a NaN or an
    infinite value enters is NaN."""
    number = np.unique(sequence, return_inverse=True)[1]

    def sums(values: Floats) -> Floats:
        return np.bincount(number, values).astype(np.float64)

    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(second - first)
        room = np.maximum(-np.expm1((first + second) / 2), 0.0)
        c = _known(ratio(sums(size), sums(room))) if size.any() else Estimate(0.0, 0.0, 0.0)
        mean_ratio = _known(ratio(sums(np.exp(second - first)), sums(np.ones_like(size))))
    return TokenNoise(
        sequences=int(number.max()) + 1,
        room=float(room.mean()),
        c=c.value,
        c_low=max(c.low, 0.0) if c.low == c.low else c.low,
        c_high=c.high,
        ratio_low=mean_ratio.low,
        ratio_high=mean_ratio.high,
        largest=float(scaled_errors(size, room, LEAST_ROOM).max()),
    )


def _known(estimate: Estimate) -> Estimate:
    """Replaces the ends of an infinite interval, e.g. that of one sequence, with NaN."""
    if np.isfinite([estimate.low, estimate.high]).all():
        return estimate
    return Estimate(estimate.value, float("nan"), float("nan"))
