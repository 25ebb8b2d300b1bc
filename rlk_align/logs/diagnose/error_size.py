"""The size of the error: by step and by weight version, in its tail, at sure tokens, and in the
whole run."""

import numpy as np

from rlk_align.interval import Estimate, ratio
from rlk_align.logs.diagnose import versions
from rlk_align.logs.diagnose.advice import diagnosis, untested
from rlk_align.logs.diagnose.evidence import C_STATISTIC, Evidence, Mask
from rlk_align.logs.diagnose.record import Diagnosis, Untested
from rlk_align.logs.diagnose.repeats import prompts_of, shared_prefixes
from rlk_align.logs.dumps.sequences import UNKNOWN


def stale_weights(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if the error grows with the steps or with the age of the weights, or if the labels of
    the weights' versions do not fit it."""
    answers = [_by_age(e), versions.mislabelled(e), _by_step(e)]
    diagnoses = [x for x in answers if isinstance(x, Diagnosis)]
    if diagnoses:
        return diagnoses[0]
    unknown = [x for x in answers if isinstance(x, Untested)]
    if not unknown:
        return None
    return Untested(
        name="stale-weights",
        why="; ".join(x.why for x in unknown),
        suspected=any(x.suspected for x in unknown),
    )


def _by_age(e: Evidence) -> Diagnosis | None:
    trained = e.run.train_versions[e.sequence]
    sampled = e.run.rollout_versions[e.index]
    known = (trained != UNKNOWN) & (sampled != UNKNOWN) & e.usual
    older, current = known & (sampled < trained), known & (sampled == trained)
    estimate = e.between(older, current)
    limit = e.contract.limit("stale-weights")
    if e.between(current, older).above(limit):
        return _labels_swapped(e, current, older)
    if not estimate.above(limit):
        return None
    age = float(np.mean((trained - sampled)[older]))
    why = (
        f"tokens that older weights sampled are {estimate.value:.1f} times worse than those of "
        f"the trainer's own version; their weights are {age:.1f} versions old on average"
    )
    statistic = "c of tokens from older weights over that of tokens from the trainer's version"
    samples = e.worst(e.size, older)
    return diagnosis("stale-weights", statistic, estimate, limit, why, samples)


def _labels_swapped(e: Evidence, current: Mask, older: Mask) -> Diagnosis:
    estimate = e.between(current, older)
    why = (
        "the labels of the weights' versions do not fit the noise: tokens whose label is the "
        f"trainer's own version are {estimate.value:.1f} times worse than those whose label is "
        "older. The labels are not those of the weights that sampled"
    )
    statistic = "c of tokens labelled with the trainer's version over that of older ones"
    limit, samples = e.contract.limit("stale-weights"), e.worst(e.size, current)
    return diagnosis("stale-weights", statistic, estimate, limit, why, samples, "moderate")


def _by_step(e: Evidence) -> Diagnosis | Untested | None:
    steps = np.unique(e.run.steps[e.run.steps != UNKNOWN])
    needed = e.contract.threshold("stale-weights.steps")
    needs = f"and a trend needs {needed:g}"
    if len(steps) < 2:
        why = f"the run has {len(steps) or 'no'} step{'s' * (not len(steps))}, {needs}"
        return Untested(name="stale-weights", why=why)
    third = max(1, len(steps) // 3)
    last = e.usual & np.isin(e.steps, steps[-third:])
    first = e.usual & np.isin(e.steps, steps[:third])
    estimate = e.between(last, first)
    limit = e.contract.limit("stale-weights")
    count = int(e.contract.threshold("stale-weights.parts"))
    parts = np.array_split(steps, min(len(steps), count))
    c = [e.c(e.usual & np.isin(e.steps, part)).value for part in parts]
    rises = np.mean(np.diff(c) > 0)
    statistic = "c of the last third of the steps over that of the first"
    rising = bool(rises >= e.contract.threshold("stale-weights.rises"))
    if len(steps) < needed:
        why = f"the run has {len(steps)} steps, {needs}"
        suspected = rising and estimate.above(limit)
        return Untested(name="stale-weights", why=why, suspected=suspected)
    if not estimate.above(limit) or not rising:
        return untested("stale-weights", statistic, estimate, limit, e.contract, rising)
    why = (
        f"the error grows from step to step: c is {c[0]:.2g} at first and {c[-1]:.2g} at last. The "
        "rollout's weights, or an adapter, are not those of the trainer, and the difference adds up"
    )
    return diagnosis("stale-weights", statistic, estimate, limit, why, e.worst(e.size, last))


def routing(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if more single tokens are far off than numerical noise explains."""
    limit, factor = e.contract.limit("routing"), e.contract.threshold("routing.factor")
    known = np.isfinite(e.scaled) & e.usual
    if not known.any():
        return None
    median = float(np.median(e.scaled[known]))
    far = known & (np.where(known, e.scaled, 0.0) > factor * median)
    estimate = e.share(far.astype(float), known.astype(float))
    statistic = f"share of tokens whose |Δ|/(1 − p) is more than {factor:g} times the median"
    # If the whole error is negligible, so is its tail.
    if not e.c(known).value > e.contract.limit("numerics", "negligible"):
        return None
    if not estimate.above(limit):
        return untested("routing", statistic, estimate, limit, e.contract)
    why = (
        f"{estimate.value:.1%} of the tokens, spread over all sequences, are more than {factor:g} "
        "times worse than the median one, and the others are healthy: experts are chosen "
        "differently there, or another choice flips. A dump cannot tell which"
    )
    return diagnosis("routing", statistic, estimate, limit, why, e.worst(e.size, far), "low")


def dropout(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if sure tokens are worse for their 1 − p than others, without a trend."""
    limit = e.contract.limit("dropout")
    sure, others = (e.q >= 1e-4) & (e.q < 0.05), (e.q >= 0.1) & (e.q < 0.9)
    estimate = e.pooled(sure & e.usual, others & e.usual)
    statistic = "c of tokens with p > 0.95 over that of tokens with 0.1 < p < 0.9"
    # Small errors of healthy engines are also larger at sure tokens.
    level = e.contract.limit("quantisation", dtype=e.dtype)
    if not e.c().value > level:
        return None
    if e.c().above(level) and (found := _not_repeated(e)) is not None:
        return found
    if not estimate.above(limit) or not e.c().above(level):
        return untested("dropout", statistic, estimate, limit, e.contract)
    why = (
        f"nearly certain tokens are {estimate.value:.1f} times worse for their 1 − p than others, "
        "as where dropout is on or the weights differ; numerics are equally bad everywhere. "
        "Because it does not grow with the steps, dropout is more likely; a dump cannot tell more"
    )
    return diagnosis("dropout", statistic, estimate, limit, why, e.worst(e.size, sure), "moderate")


def _not_repeated(e: Evidence) -> Diagnosis | None:
    """Holds if the trainer gives one token after the same tokens another log-prob in each
    sample."""
    if not e.contract.asks("dropout", "repeat"):
        return None
    limit = e.contract.limit("dropout", "repeat")
    cell = shared_prefixes(e.run)[e.index]
    shared = np.flatnonzero((cell >= 0) & e.usual)
    cells, number, times = np.unique(cell[shared], return_inverse=True, return_counts=True)
    repeated = times[number] > 1
    shared, number = shared[repeated], number[repeated]
    if not len(shared):
        return None
    middle = np.bincount(number, e.t[shared], len(cells)) / np.maximum(times, 1)
    variance, square = np.zeros(len(e.index)), np.zeros(len(e.index))
    freedom = times[number] / (times[number] - 1)
    variance[shared] = (e.t[shared] - middle[number]) ** 2 * freedom
    square[shared] = e.size[shared] ** 2
    # The samples of a group share these tokens, so the group is the unit.
    groups = np.unique(prompts_of(e.run), return_inverse=True)[1]
    estimate = ratio(*(np.bincount(groups, e.sums(x)).astype(float) for x in (variance, square)))
    if not estimate.above(limit):
        return None
    why = (
        f"behind the same tokens the trainer gives one token another log-prob in each sample "
        f"({len(shared):,} tokens), by about as much as the sides differ: it does not repeat "
        "itself, as where dropout is on, or where its precision's scales depend on the batch"
    )
    statistic = "variance of the trainer's log-probs of one token behind one prefix, of Δ²"
    worst = e.worst(variance)
    return diagnosis("dropout", statistic, estimate, limit, why, worst, "moderate")


def quantisation(e: Evidence) -> Diagnosis | None:
    """Holds if the error has the shape of rounding and is larger than the dtype explains."""
    limit = e.contract.limit("quantisation", dtype=e.dtype)
    estimate = e.c()
    if not estimate.above(limit):
        return None
    why = (
        f"the error has the shape of rounding, and is {estimate.value / limit:.1f} times what "
        f"{e.dtype} may make: a side computes in fewer bits (fp8, int8, a quantised cache or "
        "merged weights), its kernels are less exact, or the trainer has dropout on (behind an MLP "
        "it looks like rounding). A dump cannot tell which"
    )
    samples = e.worst(e.size)
    return diagnosis("quantisation", C_STATISTIC, estimate, limit, why, samples, "moderate")


def single_token(e: Evidence) -> Diagnosis | None:
    """Holds if the error of a token exceeds the largest one that is healthy among so many
    tokens."""
    limit = e.contract.single_token(e.dtype)
    if limit is None or limit.floor is None:
        return None
    excess = e.excess(limit.floor)
    largest, bound = float(excess.max()), limit.fail_at(len(excess))
    if largest <= bound:
        return None
    why = (
        f"one token is {largest:.0f} times as far off as tokens usually are, and of so many tokens "
        f"the worst healthy one stays below {bound:.0f} times: no rounding makes that. Another "
        "value may stand in place of this log-prob, or a choice flips there"
    )
    statistic = "the largest |Δ|/(1 − p), in multiples of c"
    found = Estimate(largest, largest, largest)
    return diagnosis(
        "single-token", statistic, found, bound, why, e.worst(excess, excess > bound), "moderate"
    )


def numerics(e: Evidence, mean_ratio: Estimate) -> Diagnosis:
    """The diagnosis if no other holds: rounding and summation order."""
    limit = e.contract.limit("quantisation", dtype=e.dtype)
    why = (
        f"the error has no sign, is equally large at every probability, and E[ρ] is "
        f"{mean_ratio.value:.4f}: ordinary rounding and summation order"
    )
    return diagnosis("numerics", C_STATISTIC, e.c(), limit, why, e.worst(e.size))
