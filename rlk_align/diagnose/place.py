"""Where the error is: after a turn, in later sequences of a pack, at far positions, after cached
tokens, in some sequences."""

from itertools import pairwise

import numpy as np

from rlk_align.diagnose.advice import diagnosis
from rlk_align.diagnose.evidence import Evidence, Indices, Mask
from rlk_align.diagnose.interval import share
from rlk_align.diagnose.record import Confidence, Diagnosis
from rlk_align.dumps.sequences import UNKNOWN

_WINDOW = 12
"""Tokens on each side of a turn's start that are held against each other."""
_WORSE = 4.0
"""A sequence is clean before a turn and wrong after it where c grows by such a factor."""
_BY_CHANCE = 0.3
"""A first step without a broken group says something where chance would not leave it so."""


def turn_boundary(e: Evidence) -> Diagnosis | None:
    """Holds where sequences are clean until a turn starts, and wrong from there on."""
    limit = e.contract.limit("turn-boundary")
    several = np.bincount(e.sequence, e.segment > 0, len(e.run)) > 0
    turn = _worst_turn(e)
    affected = turn > 0
    part = share(int(affected.sum()), int(several.sum()))
    if affected.sum() < 2 or not part.above(e.contract.limit("decode-state")):
        return None
    of_affected = affected[e.sequence]
    later = e.segment >= turn[e.sequence]
    start = np.full(len(e.run), e.run.tokens)
    np.minimum.at(start, e.sequence[later], np.flatnonzero(later))
    distance = np.arange(len(e.index)) - start[e.sequence]
    after = of_affected & later & (distance < _WINDOW)
    before = of_affected & ~later & (distance >= -_WINDOW)
    estimate = e.within(after, before)
    if not estimate.above(limit):
        return None
    why = (
        f"{int(affected.sum()):,} of {int(several.sum()):,} sequences of several turns are clean "
        f"until a turn starts, most often turn {np.bincount(turn[affected]).argmax() + 1}, and "
        "wrong from there on: the trainer reads other ids or another template than the rollout"
    )
    statistic = f"c of the {_WINDOW} tokens after the turn's start over that of those before"
    samples = e.worst(e.size, after)
    return diagnosis("turn-boundary", statistic, estimate, limit, why, samples)


def _worst_turn(e: Evidence) -> Indices:
    """[S]; the segment from which on a sequence is much worse than before, or 0."""
    best = np.full(len(e.run), _WORSE)
    turn = np.zeros(len(e.run), dtype=np.int64)
    for k in range(1, min(int(e.segment.max(initial=0)), 50) + 1):
        sizes, qs = e.noise(e.segment < k)
        sizes_after, qs_after = e.noise(e.segment >= k)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = sizes_after / qs_after / (sizes / qs)
        better = (qs > 2) & (qs_after > 1) & (growth > best)
        best[better], turn[better] = growth[better], k
    return turn


def packing(e: Evidence) -> Diagnosis | None:
    """Holds where the first sequence of each pack is clean and later ones are not."""
    place = e.run.pack_indices[e.sequence]
    estimate = e.between(place > 0, place == 0)
    limit = e.contract.limit("packing")
    if not estimate.above(limit):
        return None
    why = (
        f"sequences behind the first of their pack are {estimate.value:.1f} times worse than the "
        "first: positions, attention or state are not reset between them"
    )
    statistic = "c of later sequences of a pack over that of first ones"
    samples = e.worst(e.size, place > 0)
    return diagnosis("packing", statistic, estimate, limit, why, samples)


def rope(e: Evidence) -> Diagnosis | None:
    """Holds where the error grows with the position."""
    limit = e.contract.limit("rope")
    if not len(e.position):
        return None
    lengths = np.bincount(e.sequence, minlength=len(e.run))
    # The longer half: short sequences do not reach far.
    typical = np.median(lengths[lengths > 0])
    long = e.usual & (lengths >= typical)[e.sequence]
    first = np.zeros(len(e.run), dtype=np.int64)
    first[e.sequence[::-1]] = np.arange(len(e.index))[::-1]
    part = (np.arange(len(e.index)) - first[e.sequence]) / np.maximum(lengths, 1)[e.sequence]
    estimate = e.within(long & (part > 2 / 3), long & (part < 1 / 3))
    if not estimate.above(limit):
        return None
    bins = np.quantile(e.position[long], np.linspace(0, 1, 9))
    profile = [e.c(long & (e.position >= a) & (e.position < b)).value for a, b in _pairs(bins)]
    jumps = np.diff(np.log(np.maximum(profile, 1e-12)))
    step = jumps.max() > 0.6 * jumps[jumps > 0].sum() if (jumps > 0).any() else False
    shape = f"with a step near position {bins[1 + jumps.argmax()]:.0f}" if step else "steadily"
    why = (
        f"the error grows with the position, {shape}: c is {profile[0]:.2g} at the start and "
        f"{profile[-1]:.2g} at the end. RoPE's base, scaling or precision differs, or another "
        "part that depends on the position"
    )
    statistic = "c of the last third of a sequence over that of its first third"
    samples = e.worst(e.size, long & (part > 2 / 3))
    return diagnosis("rope", statistic, estimate, limit, why, samples)


def _pairs(bins: np.ndarray) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in pairwise(bins)]


def stale_cache(e: Evidence) -> Diagnosis | None:
    """Holds where sequences that started from cached tokens are worse than others."""
    cached = e.run.cached_tokens
    if (cached != UNKNOWN).any():
        return _by_cached_tokens(e)
    return _by_group(e)


def _by_cached_tokens(e: Evidence) -> Diagnosis | None:
    hit, miss = _from_cache(e), _computed_anew(e)
    both = np.intersect1d(e.run.steps[hit], e.run.steps[miss])
    comparable = np.isin(e.run.steps, both if len(both) else e.run.steps)
    of_hit = (comparable & hit)[e.sequence]
    estimate = e.between(of_hit, (comparable & miss)[e.sequence])
    limit = e.contract.limit("stale-cache")
    if not estimate.above(limit):
        return None
    why = (
        f"sequences whose prompt came from the prefix cache are {estimate.value:.1f} times worse "
        "than others of the same step: the cache was filled by older weights"
    )
    statistic = "c of sequences with cached tokens over that of others"
    return diagnosis("stale-cache", statistic, estimate, limit, why, e.worst(e.size, of_hit))


def _from_cache(e: Evidence) -> Mask:
    """[S]; sequences with cached tokens that none of their own group put there."""
    return (e.run.cached_tokens > 0) & ~_computed_anew(e)


def _computed_anew(e: Evidence) -> Mask:
    """[S]; sequences without cached tokens, and those of their groups: the samples of a prompt
    share what the first of them computed, by weights of the same step."""
    names = [
        f"{s} {g}" if g is not None else f"alone {k}"
        for k, (s, g) in enumerate(zip(e.run.steps, e.run.groups, strict=True))
    ]
    groups = np.unique(np.array(names), return_inverse=True)[1]
    return np.asarray(np.isin(groups, groups[e.run.cached_tokens == 0]))


def _by_group(e: Evidence) -> Diagnosis | None:
    """Without counts of cached tokens: groups are broken as wholes, and none is on the first step,
    before which no weights were updated."""
    groups, broken = broken_groups(e)
    steps = np.unique(e.run.steps)
    first = np.unique(groups[e.run.steps == steps[0]]) if len(steps) > 1 else np.empty(0, int)
    later = np.setdiff1d(np.unique(groups), first)
    if not len(first) or broken[first].any() or not broken[later].any():
        return None
    part = float(broken[later].mean())
    chance = (1 - part) ** len(first)
    if chance > _BY_CHANCE:
        return None
    estimate = share(int(broken[later].sum()), len(later))
    limit = e.contract.limit("decode-state")
    if not estimate.above(limit):
        return None
    why = (
        f"{part:.0%} of the groups are far off in most of their samples, from the first token of "
        f"the response on, and none on the first step: they started from a prefix cache of older "
        "weights. The dump has no counts of cached tokens, which would prove it"
    )
    statistic = "share of groups after the first step that are far off"
    samples = e.worst(e.size, ~e.usual)
    sure: Confidence = "moderate" if chance < 0.02 else "low"
    return diagnosis("stale-cache", statistic, estimate, limit, why, samples, sure)


def broken_groups(e: Evidence) -> tuple[Indices, Mask]:
    """[S]: the number of each sequence's group; and for each group whether most of its sequences
    are outliers."""
    names = [f"{s} {g}" for s, g in zip(e.run.steps, e.run.groups, strict=True)]
    _, groups = np.unique(np.array(names), return_inverse=True)
    return groups, np.bincount(groups, e.outliers) >= 0.75 * np.bincount(groups)


def decode_state(e: Evidence) -> Diagnosis | None:
    """Holds where some sequences are far worse than the others of their step."""
    limit: float = e.contract.limit("decode-state")
    count = int(e.outliers.sum())
    estimate = share(count, len(e.run))
    if count < 2 or not estimate.above(limit):
        return None
    groups, broken = broken_groups(e)
    shared = float(broken[groups[e.outliers]].mean())
    together: Confidence = "high" if shared > 0.7 else "moderate"
    how = (
        "in every sample of their group, so it is the prompt that breaks"
        if together == "high"
        else "in single samples of their groups"
    )
    why = (
        f"{count:,} of {len(e.run):,} sequences are more than 6 times worse than the median one "
        f"of their step, {how}: the rollout decoded them in a broken state (cache blocks, padding, "
        "a kernel's path for some lengths)"
    )
    statistic = "share of sequences that are far off"
    samples = e.worst(e.size, ~e.usual)
    return diagnosis("decode-state", statistic, estimate, limit, why, samples, together)
