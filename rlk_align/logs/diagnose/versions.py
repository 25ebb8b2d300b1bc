"""Tests whether the labels of the weights' versions fit the noise: tokens with one label should be
from one version, and so equally noisy.

Tokens are divided by the noise of half of them, and the noise is measured on the other half, so
that the choice of the division has no bias.
"""

import numpy as np

from rlk_align.interval import Floats, mean_factor
from rlk_align.logs.diagnose.advice import diagnosis
from rlk_align.logs.diagnose.evidence import Evidence, Indices, Mask, log_c
from rlk_align.logs.diagnose.record import Diagnosis, Untested
from rlk_align.logs.dumps.sequences import UNKNOWN

_CUTS = tuple(k / 10 for k in range(1, 10))
"""The positions at which the version may change within a sequence, as fractions of its length."""


def mislabelled(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if tokens with one label are from two versions of the weights."""
    if not e.contract.asks("stale-weights", "labels"):
        return None
    return _within_sequences(e) or _between_sequences(e)


def one_label(e: Evidence) -> Mask:
    """[S]; sequences whose compared tokens all have one label."""
    versions = e.run.rollout_versions[e.index]
    low = np.full(len(e.run), np.iinfo(np.int64).max)
    high = np.full(len(e.run), np.iinfo(np.int64).min)
    np.minimum.at(low, e.sequence, versions)
    np.maximum.at(high, e.sequence, versions)
    return np.asarray((low == high) & (low != UNKNOWN))


def _within_sequences(e: Evidence) -> Diagnosis | None:
    """Holds if the weights were updated while sequences were sampled: earlier tokens are
    noisier."""
    asked = one_label(e)[e.sequence] & e.usual
    if not asked.any():
        return None
    even = np.arange(len(e.index)) % 2 == 0
    early = _part(e) < _cuts(e, asked & even)[e.sequence]
    estimate = e.within(asked & ~even & early, asked & ~even & ~early)
    limit = e.contract.limit("stale-weights", "labels")
    if not estimate.above(limit):
        return None
    why = (
        f"the labels of the weights' versions do not fit the noise: within sequences of one label "
        f"the tokens before some position are {estimate.value:.1f} times worse than later ones, "
        "as where the weights were updated while a sequence was sampled. The label is older than "
        "its later tokens, or newer than its earlier ones"
    )
    statistic = "c of the first tokens of sequences of one label over that of the last ones"
    samples = e.worst(e.size, asked & early)
    return diagnosis("stale-weights", statistic, estimate, limit, why, samples, "moderate")


def _part(e: Evidence) -> Floats:
    """[n]; the position of each token in its sequence, from 0 to 1."""
    lengths = np.bincount(e.sequence, minlength=len(e.run))
    first = np.cumsum(lengths) - lengths
    number = np.arange(len(e.index)) - first[e.sequence]
    return np.asarray(number / np.maximum(lengths, 1)[e.sequence])


def _cuts(e: Evidence, where: Mask) -> Floats:
    """[S]; the fraction of each sequence at which its noise changes most, by the likelihood of two
    exponential distributions."""
    part, smallest = _part(e), e.contract.threshold("noise.part-q")
    best, cut = np.full(len(e.run), np.inf), np.zeros(len(e.run))
    for candidate in _CUTS:
        fit = np.zeros(len(e.run))
        for side in (part < candidate, part >= candidate):
            size, q = e.noise(where & side)
            known = (q >= smallest) & (size > 0)
            log = np.log(np.where(known, size, 1.0) / np.where(known, q, 1.0))
            fit += np.where(known, q * log, np.inf)
        better = fit < best
        best[better], cut[better] = fit[better], candidate
    return cut


def _between_sequences(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if sequences with one label have two separate levels of noise."""
    threshold = e.contract.threshold
    even = np.arange(len(e.index)) % 2 == 0
    of_choice, of_measure = (_logs(e, half & e.usual) for half in (even, ~even))
    usable = _most_frequent_age(e) & np.isfinite(of_choice) & np.isfinite(of_measure)
    chosen = np.flatnonzero(usable & e.distinct)
    if len(chosen) < threshold("stale-weights.sequences"):
        return None
    chosen = chosen[np.argsort(of_choice[chosen])]
    cut = _division(of_choice[chosen])
    low, high = of_measure[chosen[:cut]], of_measure[chosen[cut:]]
    spread = np.sqrt((low.var() * len(low) + high.var() * len(high)) / len(chosen))
    separation = float((high.mean() - low.mean()) / spread) if spread > 0 else np.inf
    estimate = mean_factor(high, low)
    limit = e.contract.limit("stale-weights", "labels")
    distinct = separation > threshold("stale-weights.distinct")
    worse = estimate.value > threshold("stale-weights.worse")
    if not (distinct and worse and estimate.above(limit)):
        return None
    what = (
        f"of {len(chosen):,} sequences of one label {len(high):,} are {estimate.value:.1f} times "
        "worse than the others, and few lie between"
    )
    if not separation > threshold("stale-weights.apart"):
        why = f"{what}: they may be of two versions of the weights with one label"
        return Untested(name="stale-weights", why=why)
    why = (
        f"the labels of the weights' versions do not fit the noise: {what}. They are of two "
        "versions, and the label is older or newer than some of them"
    )
    statistic = "c of the worse of two kinds of sequences of one label over that of the others"
    of_worse = np.zeros(len(e.run), dtype=bool)
    of_worse[chosen[cut:]] = True
    samples = e.worst(e.size, of_worse[e.sequence])
    return diagnosis("stale-weights", statistic, estimate, limit, why, samples, "moderate")


def _logs(e: Evidence, where: Mask) -> Floats:
    """[S]; the logarithm of c of each sequence, NaN if it has too few such tokens."""
    return log_c(*e.noise(where), e.contract.threshold("noise.sequence-q"))


def _most_frequent_age(e: Evidence) -> Mask:
    """[S]; sequences with one label and the most frequent age. The age is the trainer's version, or
    the step if that is unknown, minus the label."""
    asked = one_label(e)
    label = np.zeros(len(e.run), dtype=np.int64)
    label[e.sequence] = e.run.rollout_versions[e.index]
    trained = e.run.train_versions
    age = np.where(trained != UNKNOWN, trained, e.run.steps) - label
    ages, times = np.unique(age[asked], return_counts=True)
    return asked & (age == ages[times.argmax()]) if len(ages) else asked


def _division(values: Floats) -> int:
    """The index that best divides ascending values into two parts, by least squares. Each part has
    at least a tenth of the values."""
    count, least = len(values), max(2, len(values) // 10)
    cuts: Indices = np.arange(least, count - least + 1)
    sums, total = np.cumsum(values)[cuts - 1], float(values.sum())
    between = sums**2 / cuts + (total - sums) ** 2 / (count - cuts)
    return int(cuts[between.argmax()])
