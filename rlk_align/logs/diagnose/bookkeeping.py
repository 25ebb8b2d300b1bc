"""Faults of a run's bookkeeping: nothing to compare, log-probs of other tokens, a wrong mask,
missing log-probs, or log-probs that were stored in fewer bits."""

import numpy as np

from rlk_align.interval import Estimate, Floats, share
from rlk_align.logs.diagnose import fill_values
from rlk_align.logs.diagnose.advice import diagnosis
from rlk_align.logs.diagnose.evidence import FARTHEST, Evidence, Indices, Mask
from rlk_align.logs.diagnose.record import Diagnosis
from rlk_align.logs.dumps.sequences import Sequences

_LAGS = tuple(k for k in range(-3, 4) if k)
_ZERO_BITS = {"bfloat16": 16, "float16": 13}
"""Dtype -> how many low bits of a float32 are 0 if the value fits into the dtype."""


def vacuous(e: Evidence) -> Diagnosis | None:
    """Holds if nothing is compared, or if a side is empty or a copy of the other."""
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
    """Holds if a sequence's log-probs fit those of the other side a few tokens further on."""
    threshold = e.contract.threshold
    needed, better = threshold("misaligned.tokens"), threshold("misaligned.better")
    sums, far, counts = lag_errors(e)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / counts
    at_zero = means[:, 0]
    enough = (counts >= needed).all(1) & (at_zero > e.contract.limit("numerics", "negligible"))
    best = means[:, 1:].argmin(1)
    fits = enough & (means[:, 1:].min(1) < better * at_zero)
    # If only the first token is far off, another lag just omits it.
    far_at_best = np.take_along_axis(far[:, 1:], best[:, None], 1)[:, 0]
    fits &= (far[:, 0] >= threshold("misaligned.far-tokens")) & (far_at_best < better * far[:, 0])
    long = e.distinct & (counts[:, 0] >= needed)
    estimate = share(int((fits & e.distinct).sum()), int(long.sum()))
    limit = e.contract.limit("misaligned")
    if not estimate.above(limit):
        return None
    mean_at_lag = float(np.median(means[fits, 1 + best[fits]]))
    common = _LAGS[np.bincount(best[fits]).argmax()]
    way = "further on" if common > 0 else "earlier"
    why = (
        f"in {int(fits.sum()):,} sequences the trainer's log-probs fit the rollout's "
        f"{abs(common)} token{'s' if abs(common) > 1 else ''} {way}: mean |Δ| is "
        f"{np.nanmedian(at_zero[fits]):.2g} as dumped, and {mean_at_lag:.2g} at this lag"
    )
    samples = e.worst(e.size, fits[e.sequence])
    statistic = "share of sequences that fit at another lag"
    return diagnosis("misaligned", statistic, estimate, limit, why, samples)


def lag_errors(e: Evidence) -> tuple[Floats, Floats, Floats]:
    """Returns three arrays [S, 7] for lag 0 and each lag k of _LAGS: the sums of |t[i + k] − g[i]|,
    the numbers of tokens at which this is large, and the numbers of all tokens."""
    run = e.run
    usable = np.zeros(run.tokens, dtype=bool)
    usable[e.index] = True
    far_off = e.contract.threshold("misaligned.far")
    sums, far, counts = [], [], []
    for lag in (0, *_LAGS):
        other = e.index + lag
        inside = (other >= run.offsets[e.sequence]) & (other < run.offsets[e.sequence + 1])
        other = np.where(inside, other, 0)
        inside &= usable[other]
        error = np.minimum(np.abs(run.train[other] - e.g), FARTHEST)
        sums.append(e.sums(np.where(inside, error, 0.0)))
        far.append(e.sums((inside & (error > far_off)).astype(np.float64)))
        counts.append(e.sums(inside.astype(np.float64)))
    return np.stack(sums, 1), np.stack(far, 1), np.stack(counts, 1)


def mask_shifted(e: Evidence) -> Diagnosis | None:
    """Holds if segments of the mask start or end on a token that was not sampled."""
    run = e.run
    if run.mask_rewritten.any():
        return None
    # The trainer scores every token, independently of the mask. A value that is not finite or above
    # 0 was computed, so it is broken, and not the sign of a wrong mask.
    default = np.isfinite(run.rollout) & ~fill_values.above_zero(run.rollout, e.contract)
    sentinel = e.contract.threshold("missing.sentinel")
    blank = run.rollout_missing | (
        e.filled_sides[0] & default & (np.abs(run.train) <= -sentinel) & run.scored
    )
    sampled = ~run.rollout_missing & (run.rollout != 0) & (run.rollout > sentinel)
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
    left_out_beside = (left_out_before | left_out_after)[shifted]
    # If a side drops the log-prob of one token, such as the end of a sequence, all of the edges
    # have the same id.
    if _only_id(
        run, np.where(early, first, last)[shifted]
    ) is not None and left_out_beside.mean() < e.contract.threshold("mask-shifted.left-out"):
        return None
    way = "early" if early.sum() >= late.sum() else "late"
    why = (
        f"{int(shifted.sum()):,} of {len(first):,} segments of the mask lie {way}: they start or "
        "end on a token that the rollout did not sample, or leave out one that it sampled"
    )
    indices = np.where(early, first, last)[shifted]
    statistic = "share of the mask's segments whose edge is misplaced"
    return diagnosis("mask-shifted", statistic, estimate, limit, why, e.tokens(indices))


def _last_of_segments(e: Evidence, first: Indices) -> Indices:
    scored = np.flatnonzero(e.run.scored)
    ends = np.searchsorted(scored, first[1:]) - 1
    return np.concatenate([scored[ends], scored[-1:]]) if len(first) else first


def _alone_beside(marked: Mask, tokens: Indices, by: int, sequence: Indices) -> Mask:
    """Whether exactly one token next to each of these tokens is marked. A mask that omits a part of
    the response on purpose omits several tokens."""
    one = _neighbour(marked, tokens, by, sequence)
    return one & ~_neighbour(marked, tokens, 2 * by, sequence)


def _neighbour(marked: Mask, tokens: Indices, by: int, sequence: Indices) -> Mask:
    """Whether the token `by` tokens after each of these tokens, in its sequence, is marked."""
    other = np.clip(tokens + by, 0, len(marked) - 1)
    return marked[other] & (sequence[other] == sequence[tokens]) & (other != tokens)


def above_zero(e: Evidence) -> Diagnosis | None:
    """Holds if a side has values above 0, which cannot be log-probs."""
    counts, limit = e.counts, e.contract.limit("missing")
    sides = (
        ("rollout", counts.rollout_above_zero, e.run.rollout),
        ("trainer", counts.train_above_zero, e.run.train),
    )
    count, values = max((x[1:] for x in sides), key=lambda x: x[0])
    estimate = share(count, counts.compared)
    if not estimate.above(limit):
        return None
    side = " and ".join(name for name, number, _ in sides if number)
    indices = np.flatnonzero(e.run.compared & fill_values.above_zero(values, e.contract))
    values_above = values[indices]
    cause = "they are not log-probs of a normalised distribution"
    if 2 * count > counts.compared:
        cause = "the sign is flipped: they are −log p"
        if len(values_above) and values_above.max() <= 1:
            cause = "they look like probabilities, without a logarithm, or their sign is flipped"
    why = (
        f"{count:,} of {counts.compared:,} compared tokens have a value above 0 from the {side}, "
        f"where a log-prob is at most 0: {cause}"
    )
    statistic = "share of compared tokens whose value is above 0"
    return diagnosis("above-zero", statistic, estimate, limit, why, e.tokens(indices))


def missing(e: Evidence) -> Diagnosis | None:
    """Holds if scored tokens have no log-prob, or another value in its place."""
    counts, run = e.counts, e.run
    sides = (("rollout", e.filled_sides[0], run.rollout), ("trainer", e.filled_sides[1], run.train))
    filled = np.zeros(run.tokens, dtype=bool)
    fills_in_words: list[str] = []
    for side, mask, values in sides:
        indices = np.flatnonzero(mask & ~fill_values.above_zero(values, e.contract))
        filled[indices] = True
        fills_in_words += _fill_words(e, side, indices, values[indices])
    null = np.flatnonzero(run.scored & ~run.compared)
    if filled.any() or counts.filled:
        number, of = max(int(filled.sum()), counts.filled), counts.compared
        # `counts` cover the whole run, and `filled` covers the sample.
        of = of if counts.filled >= filled.sum() else int(run.compared.sum())
        estimate, limit = share(number, of), e.contract.limit("missing")
        why = (
            f"{number:,} of {of:,} compared tokens {_have(number)} another value in place of a "
            "log-prob, and so a wrong importance ratio"
        )
        why += f": {'; '.join(fills_in_words)}" if fills_in_words else ""
        if counts.missing:
            why += f". {counts.missing:,} more have no value on one side or on both"
        statistic = "share of compared tokens with another value in place of a log-prob"
        indices = np.flatnonzero(filled)
    else:
        # The whole run is counted, so the share has no interval.
        part = counts.missing / counts.scored
        estimate, limit = Estimate(part, part, part), e.contract.limit("missing", "null")
        why = (
            f"{counts.missing:,} of {counts.scored:,} scored tokens "
            f"{_have(counts.missing)} no log-prob on one side or on both{_where_words(e, null)}"
        )
        statistic, indices = "share of scored tokens without a log-prob", null
    if not estimate.above(limit):
        return None
    return diagnosis("missing", statistic, estimate, limit, why, e.tokens(indices))


_SHOWN_KINDS = 3
"""Kinds of values in place of log-probs that a diagnosis names."""


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _fill_words(e: Evidence, side: str, indices: Indices, values: Floats) -> list[str]:
    """Describes the values that a side has in place of log-probs, the most frequent ones first."""
    indices_by_kind = [
        (what, indices[of]) for what, of in fill_values.kinds(values, e.contract) if of.any()
    ]
    indices_by_kind.sort(key=lambda x: -len(x[1]))
    return [
        f"{what} from the {side} at {len(at):,} token{'s' if len(at) > 1 else ''}"
        f"{_where_words(e, at)}"
        for what, at in indices_by_kind[:_SHOWN_KINDS]
    ]


def _where_words(e: Evidence, indices: Indices) -> str:
    """Describes what several tokens have in common: their id, or an edge of their turns."""
    if len(indices) < 2:
        return ""
    common = []
    token = _only_id(e.run, indices)
    if token is not None:
        common.append(f"each of them is token {token}")
    first = np.flatnonzero(e.first_of_segment)
    for edge, word in ((_last_of_segments(e, first), "last"), (first, "first")):
        if np.isin(indices, edge).all():
            common.append(f"each is the {word} scored one of its turn")
            break
    return f" ({', and '.join(common)})" if common else ""


def _only_id(run: Sequences, indices: Indices) -> int | None:
    """The id that all of these tokens have; None if there are several ids, or if it is unknown."""
    ids = np.unique(run.token_ids[indices])
    return int(ids[0]) if len(ids) == 1 and ids[0] >= 0 else None


def low_precision(e: Evidence) -> Diagnosis | None:
    """Holds if a side's log-probs fit into a smaller dtype."""
    limit = e.contract.limit("low-precision")
    for side, values in (("rollout", e.g), ("train", e.t)):
        bits = values.astype(np.float32).view(np.uint32)[values != 0]
        for dtype, low in _ZERO_BITS.items():
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
