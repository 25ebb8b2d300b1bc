"""Log-probs of different distributions: of another token, temperature or truncation.

Numerical noise has no preferred sign. If the sides' distributions differ, the sign of Δ depends on
p.
"""

import numpy as np

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.advice import diagnosis
from rlk_align.logs.diagnose.evidence import FARTHEST, Evidence, Mask
from rlk_align.logs.diagnose.record import Diagnosis


def wrong_token(e: Evidence) -> Diagnosis | None:
    """Holds if one side is sure of a token that the other side finds improbable, while both agree
    on probable tokens: they score two different tokens, often the sampled one and the most probable
    one."""
    limit, threshold = e.contract.limit("wrong-token"), e.contract.threshold
    far_apart, rarest = threshold("wrong-token.apart"), threshold("wrong-token.rare")
    for side, low, sign in (("rollout", e.t, -1.0), ("trainer", e.g, 1.0)):
        # In broken sequences tokens are improbable because of the noise.
        rare = (low < rarest) & e.usual
        wrong = rare & (e.d * sign > far_apart)
        estimate = e.share(wrong.astype(float), rare.astype(float))
        other = int((e.d * sign < -far_apart).sum())
        probable = np.maximum(e.g, e.t) > threshold("wrong-token.probable")
        clean = e.scaled[probable & (e.size < far_apart)]
        clean = clean[np.isfinite(clean)]
        opposite = other > threshold("wrong-token.opposite") * wrong.sum()
        if not estimate.above(limit) or opposite or fits_line(e):
            continue
        if not len(clean) or float(np.median(clean)) > threshold("wrong-token.agree"):
            continue
        why = (
            f"where the {'trainer' if side == 'rollout' else 'rollout'} gives the sampled token "
            f"less than {np.exp(rarest):.0%}, the {side} is far more certain in "
            f"{estimate.value:.0%} of the cases, and elsewhere they agree: its log-probs are of "
            "another token, such as the most probable one"
        )
        statistic = "share of improbable tokens of which one side is far more certain"
        return diagnosis("wrong-token", statistic, estimate, limit, why, e.worst(e.size, wrong))
    return None


def logprob_scaled(e: Evidence) -> Diagnosis | None:
    """Holds if one side's log-probs are the other side's times one factor, at every p."""
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
    """Holds if Δ of probable tokens has one sign and Δ of improbable tokens the other, and the
    kept mass, if it is recorded, does not explain Δ."""
    if by_kept_mass(e) is not None:
        return None
    unbiased = e.contract.limit("numerics") * e.contract.threshold("temperature.unbiased")
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
        if abs(ratio_mean - 1) > unbiased
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
    """Holds if the recorded kept mass explains Δ. If no mass is recorded, it holds if Δ has one
    sign at every p and a size that does not grow with −log p."""
    limit = e.contract.limit("truncation")
    if np.isfinite(e.log_kept).any():
        return by_kept_mass(e)
    where = _band(e, 0.0, 0.9)
    negative = e.share((where & (e.d < 0)).astype(float), where.astype(float))
    positive = Estimate(1 - negative.value, 1 - negative.high, 1 - negative.low)
    mostly_negative = negative.value > positive.value
    purity = negative if mostly_negative else positive
    one_sided = lean(e, _band(e, 0.0, 0.3)).value * lean(e, _band(e, 0.9, 0.9995)).value > 0
    if not purity.above(limit) or not one_sided or fits_line(e):
        return None
    far = float(np.mean(e.size > e.contract.threshold("truncation.far")))
    if far > e.contract.threshold("truncation.far-tokens"):
        return None
    side = "rollout" if mostly_negative else "trainer"
    kept_mass = float(np.exp(-np.abs(np.median(e.d[where]))))
    why = (
        f"{purity.value:.0%} of the tokens are more probable to the {side}, by about the same "
        "factor whatever their probability: its log-probs are of the truncated distribution "
        f"(top-p, top-k or min-p), which keeps about {kept_mass:.2f} of the mass there"
    )
    samples = e.worst(np.abs(e.d), where)
    statistic = "share of tokens with p < 0.9 that have the same sign"
    return diagnosis("truncation", statistic, purity, limit, why, samples)


def by_kept_mass(e: Evidence) -> Diagnosis | None:
    """Holds if the logarithm of the recorded kept mass is most of Δ, as where one side's log-probs
    are among the kept tokens and the other's among all. Tokens count by that logarithm."""
    statistic = "kept-mass" if e.contract.asks("truncation", "kept-mass") else None
    limit, left = e.contract.limit("truncation", statistic), e.contract.threshold("truncation.rest")
    log = np.nan_to_num(e.log_kept)
    for side, sign in (("rollout", 1.0), ("trainer", -1.0)):
        near = np.abs(e.d - sign * log) < left * np.abs(e.d)
        explained = e.share(np.where(near, -log, 0.0), -log)
        if not explained.above(limit):
            continue
        other = "trainer" if side == "rollout" else "rollout"
        mass = float(np.exp(log[log < 0]).mean())
        why = (
            f"log(kept mass), which the dump records, is most of Δ for {explained.value:.0%} of "
            f"the tokens, counted by it: the {side}'s log-probs are among the tokens that top-p, "
            f"top-k or min-p keep, and the {other}'s are among all. Where tokens were dropped, "
            f"{mass:.3f} of the mass was kept. It is not another temperature"
        )
        words = "share of tokens, by log(kept mass), of which it is most of Δ"
        samples = e.worst(np.abs(e.d), log < 0)
        return diagnosis("truncation", words, explained, limit, why, samples)
    return None


def _band(e: Evidence, low: float, high: float) -> Mask:
    """The mask of the tokens with low ≤ p < high."""
    return (1 - e.q >= low) & (1 - e.q < high)


def lean(e: Evidence, where: Mask) -> Estimate:
    """Σd / Σ|d| in a band."""
    return e.share(
        np.where(where, np.clip(e.d, -FARTHEST, FARTHEST), 0.0), np.where(where, e.size, 0.0)
    )


def sharp(e: Evidence) -> bool:
    """Whether Δ of nearly sure tokens has one sign, as with another temperature. The mean of noise
    that grows with the logits is not 0 either, by convexity, but its Δ has both signs."""
    d, few = e.d[_band(e, 0.9, 0.999)], e.contract.threshold("temperature.few-positive")
    return len(d) > 0 and not few <= float(np.mean(d > 0)) <= 1 - few


def slope(e: Evidence, where: Mask) -> Estimate:
    """d per nat of log-prob in a band."""
    logs = np.clip(e.g + e.t, -40, 0) / -2
    return e.share(
        np.where(where, np.clip(e.d, -FARTHEST, FARTHEST), 0.0), np.where(where, logs, 0.0)
    )


def slope_through(e: Evidence) -> float:
    """The slope of t on g through the origin minus 1, by least squares in units of the noise."""
    weight = 1 / np.maximum(e.q, 1e-3) ** 2
    return float((weight * e.d * e.g).sum() / (weight * e.g * e.g).sum())


def fits_line(e: Evidence) -> bool:
    """Whether d is one factor times the log-prob in every band of p."""
    bands = [
        slope(e, _band(e, *b)).value for b in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 0.999))
    ]
    sizes = np.abs(bands)
    same_sign = len({np.sign(b) for b in bands if np.isfinite(b)}) == 1
    rest = np.minimum(np.abs(e.d - slope_through(e) * e.g), FARTHEST).sum() / e.q.sum()
    # Large noise has a slope, too, by convexity.
    beyond_noise = np.nanmedian(sizes) > e.contract.threshold("line.noise") * rest
    even = np.nanmin(sizes) > e.contract.threshold("line.even") * np.nanmax(sizes)
    return bool(same_sign and beyond_noise and even)
