"""Whether the two sides' numbers belong to each other: nothing, misaligned, masked wrongly, missing
or stored in fewer bits."""

import numpy as np

from rlk_align.diagnose.advice import diagnosis
from rlk_align.diagnose.evidence import Evidence, Indices, Mask
from rlk_align.diagnose.interval import Estimate, Floats, share
from rlk_align.diagnose.record import Diagnosis

_LAGS = tuple(k for k in range(-3, 4) if k)
_LAG_TOKENS = 16
"""Tokens that a sequence needs for a lag of its own."""
_LAG_FAR = 5
"""Tokens that are far off, |d| > 0.3, that such a sequence has."""
_LAG_RATIO = 0.3
"""Another lag fits where the mean |d| falls below this part of that at lag 0."""
_MANTISSA = {"bfloat16": 16, "float16": 13}
"""Low bits of float32 that are 0 in each."""


def vacuous(e: Evidence) -> Diagnosis | None:
    """Holds where nothing is compared, or a side is empty or a copy of the other."""
    counts = e.counts
    if counts.compared == 0:
        known = "no token is scored" if counts.scored == 0 else "no scored token has both log-probs"
        why = f"{known}: there is nothing to compare"
    elif counts.equal == counts.compared:
        why = (
            "both sides are equal in every bit: the trainer's log-probs are a copy of the "
            "rollout's, or the engines are bitwise equal; a dump cannot tell which"
        )
    elif counts.compared in (counts.rollout_zero, counts.train_zero):
        side = "rollout" if counts.compared == counts.rollout_zero else "trainer"
        why = f"every log-prob of the {side} is 0: it never computed them"
    else:
        return None
    one = Estimate(1.0, 1.0, 1.0)
    return diagnosis("vacuous", "share of scored tokens without information", one, 0.0, why, [])


def misaligned(e: Evidence) -> Diagnosis | None:
    """Holds where a sequence's log-probs fit those of the other side a few tokens further on."""
    apart, far, counts = lag_errors(e)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = apart / counts
    at_zero = means[:, 0]
    enough = (counts >= _LAG_TOKENS).all(1) & (at_zero > e.contract.limit("numerics", "negligible"))
    best = means[:, 1:].argmin(1)
    fits = enough & (means[:, 1:].min(1) < _LAG_RATIO * at_zero)
    # A first token that is far off alone is left out at another lag.
    far_there = np.take_along_axis(far[:, 1:], best[:, None], 1)[:, 0]
    fits &= (far[:, 0] >= _LAG_FAR) & (far_there < _LAG_RATIO * far[:, 0])
    estimate = share(int(fits.sum()), int((counts[:, 0] >= _LAG_TOKENS).sum()))
    limit = e.contract.limit("misaligned")
    if not estimate.above(limit):
        return None
    there = float(np.median(means[fits, 1 + best[fits]]))
    common = _LAGS[np.bincount(best[fits]).argmax()]
    way = "further on" if common > 0 else "earlier"
    why = (
        f"in {int(fits.sum()):,} sequences the trainer's log-probs fit the rollout's "
        f"{abs(common)} token{'s' if abs(common) > 1 else ''} {way}: mean |Δ| is "
        f"{np.nanmedian(at_zero[fits]):.2g} as dumped, {there:.2g} there"
    )
    samples = e.worst(e.size, fits[e.sequence])
    statistic = "share of sequences that fit at another lag"
    return diagnosis("misaligned", statistic, estimate, limit, why, samples)


def lag_errors(e: Evidence) -> tuple[Floats, Floats, Floats]:
    """Three of [S, 7], at lag 0 and at each k of _LAGS: the sums of |t[i + k] − g[i]|, the numbers
    of tokens where that is far off, and those of all tokens."""
    run = e.run
    usable = np.zeros(run.tokens, dtype=bool)
    usable[e.index] = True
    sums, far, counts = [], [], []
    for lag in (0, *_LAGS):
        other = e.index + lag
        inside = (other >= run.offsets[e.sequence]) & (other < run.offsets[e.sequence + 1])
        other = np.where(inside, other, 0)
        inside &= usable[other]
        apart = np.minimum(np.abs(run.train[other] - e.g), 20.0)
        sums.append(e.sums(np.where(inside, apart, 0.0)))
        far.append(e.sums((inside & (apart > 0.3)).astype(np.float64)))
        counts.append(e.sums(inside.astype(np.float64)))
    return np.stack(sums, 1), np.stack(far, 1), np.stack(counts, 1)


def mask_shifted(e: Evidence) -> Diagnosis | None:
    """Holds where segments of the mask start or end on a token that was not sampled."""
    run = e.run
    if run.mask_rewritten.any():
        return None
    # A NaN or an infinite value was computed: it is broken, and no sign of a wrong mask.
    blank = run.rollout_missing | (
        e.filled & np.isfinite(run.rollout) & (np.abs(run.train) <= 1e3) & run.scored
    )
    sampled = ~run.rollout_missing & (run.rollout != 0) & (run.rollout > -1e3)
    first = np.flatnonzero(e.first_of_segment)
    last = _last_of_segments(e, first)
    response = run.position >= np.repeat(run.prompt_lengths, np.diff(run.offsets))
    sequence = run.sequence
    left_out = sampled & response & ~run.scored
    left_out_before = _alone_beside(left_out, first, -1, sequence)
    left_out_after = _alone_beside(left_out, last, 1, sequence)
    early = blank[first] | (left_out_after & ~left_out_before & ~response[first])
    late = blank[last] | (left_out_before & ~left_out_after & ~blank[first])
    shifted = early | late
    estimate = share(int(shifted.sum()), len(first))
    inner = int((blank & run.scored).sum() - blank[first].sum() - blank[last].sum())
    edges = int(blank[first].sum() + blank[last].sum())
    limit = e.contract.limit("mask-shifted")
    if not estimate.above(limit) or inner > edges:
        return None
    way = "early" if early.sum() >= late.sum() else "late"
    why = (
        f"{int(shifted.sum()):,} of {len(first):,} segments of the mask lie {way}: they start or "
        "end on a token that the rollout did not sample, or leave out one that it sampled"
    )
    places = np.where(early, first, last)[shifted]
    statistic = "share of the mask's segments whose edge is misplaced"
    return diagnosis("mask-shifted", statistic, estimate, limit, why, e.tokens(places))


def _last_of_segments(e: Evidence, first: Indices) -> Indices:
    scored = np.flatnonzero(e.run.scored)
    ends = np.searchsorted(scored, first[1:]) - 1
    return np.concatenate([scored[ends], scored[-1:]]) if len(first) else first


def _alone_beside(what: Mask, places: Indices, by: int, sequence: Indices) -> Mask:
    """Whether one token next to each place is `what`, and no more: a mask that leaves out a part of
    the response on purpose leaves out several."""
    one = _neighbour(what, places, by, sequence)
    return one & ~_neighbour(what, places, 2 * by, sequence)


def _neighbour(what: Mask, places: Indices, by: int, sequence: Indices) -> Mask:
    """Whether the token before or after each place, in its sequence, is `what`."""
    other = np.clip(places + by, 0, len(what) - 1)
    return what[other] & (sequence[other] == sequence[places]) & (other != places)


def missing(e: Evidence) -> Diagnosis | None:
    """Holds where something else stands instead of log-probs, or too many are null."""
    null = e.counts.missing / e.counts.scored
    found = np.flatnonzero(e.filled)
    compared = int(e.run.compared.sum())
    if len(found):
        estimate, limit = share(len(found), compared), e.contract.limit("missing")
        values, times = np.unique(_fill(e)[found], return_counts=True)
        common = values[times.argmax()]
        why = (
            f"{len(found):,} of {compared:,} compared tokens have another value in place of a "
            f"log-prob, most often {common:g}, and so a wrong importance ratio"
        )
        statistic = "share of compared tokens with another value in place of a log-prob"
    else:
        # It is counted over the whole run: no sample, and so no interval.
        estimate, limit = Estimate(null, null, null), e.contract.limit("missing", "null")
        why = f"{null:.1%} of the scored tokens have no log-prob on one side or on both"
        statistic = "share of scored tokens without a log-prob"
        found = np.flatnonzero(e.run.scored & ~e.run.compared)
    if not estimate.above(limit):
        return None
    return diagnosis("missing", statistic, estimate, limit, why, e.tokens(found))


def _fill(e: Evidence) -> Floats:
    """[N]; of each filled token the value that is the less likely log-prob."""
    g, t = e.run.rollout, e.run.train
    constant = {float(v) for v in t[e.filled][:1000]}
    of_train = len(constant) < len({float(v) for v in g[e.filled][:1000]})
    return t if of_train else g


def low_precision(e: Evidence) -> Diagnosis | None:
    """Holds where a side's log-probs end in the zero bits of a smaller format."""
    limit = e.contract.limit("low-precision")
    for side, values in (("rollout", e.g), ("train", e.t)):
        bits = values.astype(np.float32).view(np.uint32)[values != 0]
        for dtype, low in _MANTISSA.items():
            short = int((bits & np.uint32((1 << low) - 1) == 0).sum())
            estimate = share(short, len(bits))
            if estimate.above(limit):
                why = (
                    f"{short / len(bits):.0%} of the {side} side's log-probs fit into {dtype}: "
                    "they were stored in that dtype, and each is off by up to "
                    f"{2.0 ** (low - 24):.1%} of its value"
                )
                statistic = f"share of the {side} side's log-probs that fit into {dtype}"
                error = np.abs(values) * (values != 0)
                samples = e.worst(error)
                return diagnosis("low-precision", statistic, estimate, limit, why, samples)
    return None
