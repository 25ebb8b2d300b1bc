"""Errors at certain positions: after a turn, in later sequences of a pack, or far from the
start."""

from itertools import pairwise

import numpy as np

from rlk_align.interval import share
from rlk_align.logs.diagnose.advice import diagnosis, untested
from rlk_align.logs.diagnose.evidence import Evidence, Indices
from rlk_align.logs.diagnose.record import Diagnosis, Untested
from rlk_align.logs.dumps.sequences import UNKNOWN


def turn_boundary(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if sequences are clean until a turn starts, and wrong from there on."""
    limit, threshold = e.contract.limit("turn-boundary"), e.contract.threshold
    window = threshold("turn-boundary.window")
    several = np.bincount(e.sequence, e.segment > 0, len(e.run)) > 0
    turn = _worst_turn(e)
    affected = turn > 0
    part = share(int((affected & e.distinct).sum()), int((several & e.distinct).sum()))
    if affected.sum() < 2 or not part.above(e.contract.limit("decode-state")):
        return None
    of_affected = affected[e.sequence]
    later = e.segment >= turn[e.sequence]
    start = np.full(len(e.run), e.run.tokens)
    np.minimum.at(start, e.sequence[later], np.flatnonzero(later))
    distance = np.arange(len(e.index)) - start[e.sequence]
    after = of_affected & later & (distance < window)
    before = of_affected & ~later & (distance >= -window)
    estimate = e.within(after, before)
    statistic = f"c of the {window:g} tokens after the turn's start over that of those before"
    if not estimate.above(limit):
        # The sequences were chosen by their growth, which a few of many have by chance.
        share_of_all = threshold("turn-boundary.many-share") * several.sum()
        many = affected.sum() > max(threshold("turn-boundary.many"), share_of_all)
        return untested("turn-boundary", statistic, estimate, limit, e.contract, many)
    why = (
        f"{int(affected.sum()):,} of {int(several.sum()):,} sequences of several turns are clean "
        f"until a turn starts, most often turn {np.bincount(turn[affected]).argmax() + 1}, and "
        "wrong from there on: the trainer reads other ids or another template than the rollout"
    )
    samples = e.worst(e.size, after)
    return diagnosis("turn-boundary", statistic, estimate, limit, why, samples)


def _worst_turn(e: Evidence) -> Indices:
    """[S]; the segment from which on a sequence is much worse than before, or 0."""
    threshold = e.contract.threshold
    best = np.full(len(e.run), threshold("turn-boundary.growth"))
    before, after = threshold("turn-boundary.q-before"), threshold("turn-boundary.q-after")
    turn = np.zeros(len(e.run), dtype=np.int64)
    for k in range(1, min(int(e.segment.max(initial=0)), 50) + 1):
        sizes, qs = e.noise(e.segment < k)
        sizes_after, qs_after = e.noise(e.segment >= k)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = sizes_after / qs_after / (sizes / qs)
        better = (qs > before) & (qs_after > after) & (growth > best)
        best[better], turn[better] = growth[better], k
    return turn


def packing(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if the first sequence of each pack is clean and later ones are not."""
    number = e.run.pack_indices[e.sequence]
    if (number == UNKNOWN).all():
        return Untested(name="packing", why="the dump does not say how sequences were packed")
    if not (number > 0).any():
        return None
    estimate = e.between(number > 0, number == 0)
    limit = e.contract.limit("packing")
    statistic = "c of later sequences of a pack over that of first ones"
    if not estimate.above(limit):
        return untested("packing", statistic, estimate, limit, e.contract)
    why = (
        f"sequences behind the first of their pack are {estimate.value:.1f} times worse than the "
        "first: positions, attention or state are not reset between them"
    )
    samples = e.worst(e.size, number > 0)
    return diagnosis("packing", statistic, estimate, limit, why, samples)


def rope(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if the error grows with the position."""
    limit = e.contract.limit("rope")
    if not len(e.position):
        return None
    lengths = np.bincount(e.sequence, minlength=len(e.run))
    # Only the longer half counts, because short sequences have no far positions.
    typical = np.median(lengths[lengths > 0])
    long = e.usual & (lengths >= typical)[e.sequence]
    first = np.zeros(len(e.run), dtype=np.int64)
    first[e.sequence[::-1]] = np.arange(len(e.index))[::-1]
    part = (np.arange(len(e.index)) - first[e.sequence]) / np.maximum(lengths, 1)[e.sequence]
    estimate = e.within(long & (part > 2 / 3), long & (part < 1 / 3))
    statistic = "c of the last third of a sequence over that of its first third"
    if not estimate.above(limit):
        return untested("rope", statistic, estimate, limit, e.contract)
    bins = np.quantile(e.position[long], np.linspace(0, 1, 9))
    profile = [e.c(long & (e.position >= a) & (e.position < b)).value for a, b in pairwise(bins)]
    jumps = np.diff(np.log(np.maximum(profile, 1e-12)))
    growth = e.contract.threshold("rope.one-step") * jumps[jumps > 0].sum()
    step = jumps.max() > growth if (jumps > 0).any() else False
    shape = f"with a step near position {bins[1 + jumps.argmax()]:.0f}" if step else "steadily"
    why = (
        f"the error grows with the position, {shape}: c is {profile[0]:.2g} at the start and "
        f"{profile[-1]:.2g} at the end. RoPE's base, scaling or precision differs, or another "
        "part that depends on the position"
    )
    samples = e.worst(e.size, long & (part > 2 / 3))
    return diagnosis("rope", statistic, estimate, limit, why, samples)
