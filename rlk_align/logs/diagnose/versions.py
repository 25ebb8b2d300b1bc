"""Whether the labels of the weights' versions fit the noise: tokens of one label are of one
version, and so equally bad.

What is chosen by the noise of half of the tokens is measured on the other half, so that a choice
makes no difference of its own.
"""

import numpy as np

from rlk_align.interval import Floats, mean_factor
from rlk_align.logs.diagnose.advice import diagnosis
from rlk_align.logs.diagnose.evidence import Evidence, Indices, Mask
from rlk_align.logs.diagnose.record import Diagnosis, Untested
from rlk_align.logs.dumps.sequences import UNKNOWN

_CUTS = tuple(k / 10 for k in range(1, 10))
"""Where a sequence may change its version, as a part of its length."""
_PART = 1.0
"""Σ q that each part of a sequence needs to have an error of its own."""
_FEWEST = 16
"""Sequences that two kinds are told in."""
_WHOLE = 5.0
"""Σ q that each half of a sequence's tokens needs there."""
_APART, _DISTINCT = 4.0, 2.9
"""How many of their own standard deviations two kinds of sequences lie apart: a normal law cut into
two makes 2.7, a uniform one 3.5."""
_WORSE = 2.0
"""How many times worse the second kind is, at least."""


def mislabelled(e: Evidence) -> Diagnosis | Untested | None:
    """Holds where tokens of one label are of two versions of the weights."""
    if not e.contract.asks("stale-weights", "labels"):
        return None
    return _within_sequences(e) or _between_sequences(e)


def one_label(e: Evidence) -> Mask:
    """[S]; sequences whose compared tokens all have one version's label."""
    versions = e.run.rollout_versions[e.index]
    low = np.full(len(e.run), np.iinfo(np.int64).max)
    high = np.full(len(e.run), np.iinfo(np.int64).min)
    np.minimum.at(low, e.sequence, versions)
    np.maximum.at(high, e.sequence, versions)
    return np.asarray((low == high) & (low != UNKNOWN))


def _within_sequences(e: Evidence) -> Diagnosis | None:
    """Weights that were updated while sequences were sampled: what came before is worse."""
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
        f"the tokens before some place are {estimate.value:.1f} times worse than those after it, "
        "as where the weights were updated while a sequence was sampled. The label is older than "
        "its later tokens, or newer than its earlier ones"
    )
    statistic = "c of the first tokens of sequences of one label over that of the last ones"
    samples = e.worst(e.size, asked & early)
    return diagnosis("stale-weights", statistic, estimate, limit, why, samples, "moderate")


def _part(e: Evidence) -> Floats:
    """[n]; how far in its sequence each token is, from 0 to 1."""
    lengths = np.bincount(e.sequence, minlength=len(e.run))
    first = np.cumsum(lengths) - lengths
    place = np.arange(len(e.index)) - first[e.sequence]
    return np.asarray(place / np.maximum(lengths, 1)[e.sequence])


def _cuts(e: Evidence, where: Mask) -> Floats:
    """[S]; the place at which each sequence's noise changes most, by the likelihood of two
    exponential laws."""
    part = _part(e)
    best, cut = np.full(len(e.run), np.inf), np.zeros(len(e.run))
    for place in _CUTS:
        fit = np.zeros(len(e.run))
        for side in (part < place, part >= place):
            size, q = e.noise(where & side)
            known = (q >= _PART) & (size > 0)
            log = np.log(np.where(known, size, 1.0) / np.where(known, q, 1.0))
            fit += np.where(known, q * log, np.inf)
        better = fit < best
        best[better], cut[better] = fit[better], place
    return cut


def _between_sequences(e: Evidence) -> Diagnosis | Untested | None:
    """Sequences of one label that are of two kinds: few of their errors lie between."""
    even = np.arange(len(e.index)) % 2 == 0
    of_choice, of_measure = (_logs(e, half & e.usual) for half in (even, ~even))
    usable = _most_frequent_age(e) & np.isfinite(of_choice) & np.isfinite(of_measure)
    chosen = np.flatnonzero(usable & e.distinct)
    if len(chosen) < _FEWEST:
        return None
    chosen = chosen[np.argsort(of_choice[chosen])]
    place = _division(of_choice[chosen])
    low, high = of_measure[chosen[:place]], of_measure[chosen[place:]]
    spread = np.sqrt((low.var() * len(low) + high.var() * len(high)) / len(chosen))
    apart = float((high.mean() - low.mean()) / spread) if spread > 0 else np.inf
    estimate = mean_factor(high, low)
    limit = e.contract.limit("stale-weights", "labels")
    if not (apart > _DISTINCT and estimate.value > _WORSE and estimate.above(limit)):
        return None
    what = (
        f"of {len(chosen):,} sequences of one label {len(high):,} are {estimate.value:.1f} times "
        "worse than the others, and few lie between"
    )
    if not apart > _APART:
        why = f"{what}: are they of two versions of the weights, labelled as one"
        return Untested(name="stale-weights", why=why)
    why = (
        f"the labels of the weights' versions do not fit the noise: {what}. They are of two "
        "versions, and the label is older or newer than some of them"
    )
    statistic = "c of the worse of two kinds of sequences of one label over that of the others"
    worse = np.zeros(len(e.run), dtype=bool)
    worse[chosen[place:]] = True
    samples = e.worst(e.size, worse[e.sequence])
    return diagnosis("stale-weights", statistic, estimate, limit, why, samples, "moderate")


def _logs(e: Evidence, where: Mask) -> Floats:
    """[S]; the logarithm of c of each sequence, NaN where it has none of its own."""
    size, q = e.noise(where)
    known = (q >= _WHOLE) & (size > 0)
    return np.log(np.where(known, size, np.nan) / np.where(known, q, 1.0))


def _most_frequent_age(e: Evidence) -> Mask:
    """[S]; sequences of one label whose age is the most frequent one: by how much the trainer's
    version, or the step where it is not known, is ahead of it."""
    asked = one_label(e)
    label = np.zeros(len(e.run), dtype=np.int64)
    label[e.sequence] = e.run.rollout_versions[e.index]
    trained = e.run.train_versions
    age = np.where(trained != UNKNOWN, trained, e.run.steps) - label
    ages, times = np.unique(age[asked], return_counts=True)
    return asked & (age == ages[times.argmax()]) if len(ages) else asked


def _division(values: Floats) -> int:
    """Where ascending values are best divided into two parts of least squares, a tenth at least
    in each."""
    count, least = len(values), max(2, len(values) // 10)
    places: Indices = np.arange(least, count - least + 1)
    sums, total = np.cumsum(values)[places - 1], float(values.sum())
    between = sums**2 / places + (total - sums) ** 2 / (count - places)
    return int(places[between.argmax()])
