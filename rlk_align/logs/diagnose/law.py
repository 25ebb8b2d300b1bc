"""Whether both sides mean the same distribution: another token, another temperature, another
support.

Numerics have no sign. Where the sides mean different distributions, Δ has one that depends on p.
"""

import numpy as np

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.advice import diagnosis
from rlk_align.logs.diagnose.evidence import Evidence, Mask
from rlk_align.logs.diagnose.record import Diagnosis

_RARE = -2.5
"""A log-prob below it is that of a token that is hardly ever the most probable one."""

_SLOPE = 0.3
"""A line's slope is more than the noise about it makes where it is above this part of its c."""


def wrong_token(e: Evidence) -> Diagnosis | None:
    """Holds where one side is sure of a token that the other finds improbable, and both agree on
    probable ones: they speak of two tokens, often the sampled and the most probable one."""
    limit = e.contract.limit("wrong-token")
    for side, low, sign in (("rollout", e.t, -1.0), ("trainer", e.g, 1.0)):
        # Of broken sequences the improbable tokens are those that noise made so.
        rare = (low < _RARE) & e.usual
        wrong = rare & (e.d * sign > 1)
        estimate = e.share(wrong.astype(float), rare.astype(float))
        other = int((e.d * sign < -1).sum())
        clean = e.scaled[(np.maximum(e.g, e.t) > -0.7) & (e.size < 1)]
        clean = clean[np.isfinite(clean)]
        if not estimate.above(limit) or other > 0.1 * wrong.sum() or fits_line(e):
            continue
        if not len(clean) or float(np.median(clean)) > 0.3:
            continue
        why = (
            f"where the {'trainer' if side == 'rollout' else 'rollout'} gives the sampled token "
            f"less than {np.exp(_RARE):.0%}, the {side} is far more certain in "
            f"{estimate.value:.0%} of the cases, and elsewhere they agree: its log-probs are of "
            "another token, such as the most probable one"
        )
        statistic = "share of improbable tokens of which one side is far more certain"
        return diagnosis("wrong-token", statistic, estimate, limit, why, e.worst(e.size, wrong))
    return None


def logprob_scaled(e: Evidence) -> Diagnosis | None:
    """Holds where one side's log-probs are the other's times one factor, at every p."""
    limit = e.contract.limit("logprob-scaled")
    if not fits_line(e):
        return None
    middle = slope(e, _band(e, 0.02, 0.7))
    size = middle if middle.value > 0 else -middle
    if not size.above(limit):
        return None
    factor = 1 + slope_through(e)
    why = (
        f"the trainer's log-probs are the rollout's times {factor:.3g} at every probability: one "
        f"side divided log-probs by a temperature of about {min(factor, 1 / factor):.2g} where "
        "logits should be"
    )
    samples = e.worst(np.abs(e.d))
    statistic = "|slope of the trainer's log-probs on the rollout's − 1|"
    return diagnosis("logprob-scaled", statistic, size, limit, why, samples)


def temperature(e: Evidence) -> Diagnosis | None:
    """Holds where probable tokens lean to one side and improbable ones to the other."""
    limit = e.contract.limit("temperature")
    low, high = lean(e, _band(e, 0.0, 0.05)), lean(e, _band(e, 0.9, 0.999))
    opposite = low.value * high.value < 0
    sides = [x if x.value > 0 else -x for x in (low, high)]
    weaker = min(sides, key=lambda x: x.low)
    if not opposite or not weaker.above(limit) or not sharp(e):
        return None
    sharper = "trainer" if high.value > 0 else "rollout"
    ratio_mean = float(np.mean(np.exp(np.minimum(e.d, 30.0))))
    raw = (
        f"E[ρ] = {ratio_mean:.3f}, so the rollout's log-probs are not of the distribution it "
        "sampled from"
        if abs(ratio_mean - 1) > e.contract.limit("numerics") * 3
        else "E[ρ] is 1, so the rollout's log-probs are of the distribution it sampled from, and "
        "the trainer's are not"
    )
    why = (
        f"the {sharper} finds probable tokens more probable and improbable ones less so than the "
        f"other side: its temperature is lower. {raw}"
    )
    samples = e.worst(np.abs(e.d), _band(e, 0.0, 0.05))
    statistic = "signed part of Δ, of its size, where it is the smaller: p < 0.05 or p > 0.9"
    return diagnosis("temperature", statistic, weaker, limit, why, samples)


def truncation(e: Evidence) -> Diagnosis | None:
    """Holds where Δ has one sign at every p, and a size that does not grow with −log p."""
    limit = e.contract.limit("truncation")
    where = _band(e, 0.0, 0.9)
    negative = e.share((where & (e.d < 0)).astype(float), where.astype(float))
    positive = Estimate(1 - negative.value, 1 - negative.high, 1 - negative.low)
    purity = negative if negative.value > 0.5 else positive
    one_sided = lean(e, _band(e, 0.0, 0.3)).value * lean(e, _band(e, 0.9, 0.9995)).value > 0
    if not purity.above(limit) or not one_sided or fits_line(e):
        return None
    if float(np.mean(e.size > 2.5)) > 0.02:
        return None
    side = "rollout" if negative.value > 0.5 else "trainer"
    kept = float(np.exp(-np.abs(np.median(e.d[where]))))
    why = (
        f"{purity.value:.0%} of the tokens are more probable to the {side}, by about the same "
        "factor whatever their probability: its log-probs are of the truncated distribution "
        f"(top-p, top-k or min-p), which keeps about {kept:.2f} of the mass there"
    )
    samples = e.worst(np.abs(e.d), where)
    statistic = "share of tokens with p < 0.9 that have the same sign"
    return diagnosis("truncation", statistic, purity, limit, why, samples)


def _band(e: Evidence, low: float, high: float) -> Mask:
    """Tokens of low ≤ p < high."""
    return (1 - e.q >= low) & (1 - e.q < high)


def lean(e: Evidence, where: Mask) -> Estimate:
    """The signed part of d in a band, of its size."""
    return e.share(np.where(where, np.clip(e.d, -20, 20), 0.0), np.where(where, e.size, 0.0))


def sharp(e: Evidence) -> bool:
    """Whether Δ of nearly sure tokens has a sign, as another temperature gives it. Noise that grows
    with the logits leans too, by its convexity, and has both signs."""
    d = e.d[_band(e, 0.9, 0.999)]
    return len(d) > 0 and not 0.3 <= float(np.mean(d > 0)) <= 0.7


def slope(e: Evidence, where: Mask) -> Estimate:
    """d for each nat of log-prob in a band."""
    logs = np.clip(e.g + e.t, -40, 0) / -2
    return e.share(np.where(where, np.clip(e.d, -20, 20), 0.0), np.where(where, logs, 0.0))


def slope_through(e: Evidence) -> float:
    """The slope of t on g through the origin, less 1: least squares in units of the noise."""
    weight = 1 / np.maximum(e.q, 1e-3) ** 2
    return float((weight * e.d * e.g).sum() / (weight * e.g * e.g).sum())


def fits_line(e: Evidence) -> bool:
    """Whether d is one factor times the log-prob in every band of p."""
    bands = [
        slope(e, _band(e, *b)).value for b in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 0.999))
    ]
    sizes = np.abs(bands)
    same_sign = len({np.sign(b) for b in bands if np.isfinite(b)}) == 1
    rest = np.minimum(np.abs(e.d - slope_through(e) * e.g), 20.0).sum() / e.q.sum()
    # Large noise has a slope of its own, by its convexity.
    beyond_noise = np.nanmedian(sizes) > _SLOPE * rest
    return bool(same_sign and beyond_noise and np.nanmin(sizes) > 0.6 * np.nanmax(sizes))
