"""Faults of whole sequences: a stale prefix cache, copies, and a broken state in decode."""

import numpy as np

from rlk_align.interval import share
from rlk_align.logs.diagnose.advice import diagnosis, untested
from rlk_align.logs.diagnose.evidence import Evidence, Indices, Mask
from rlk_align.logs.diagnose.record import Confidence, Diagnosis, Untested
from rlk_align.logs.diagnose.repeats import repeats
from rlk_align.logs.dumps.sequences import UNKNOWN


def stale_cache(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if sequences that started from cached tokens are worse than others."""
    cached = e.run.cached_tokens
    if (cached != UNKNOWN).any():
        return _by_cached_tokens(e)
    return _by_group(e)


def _by_cached_tokens(e: Evidence) -> Diagnosis | Untested | None:
    hit, miss = _from_cache(e), _computed_anew(e)
    both = np.intersect1d(e.run.steps[hit], e.run.steps[miss])
    comparable = np.isin(e.run.steps, both if len(both) else e.run.steps)
    of_hit = (comparable & hit)[e.sequence]
    estimate = e.between(of_hit, (comparable & miss)[e.sequence])
    limit = e.contract.limit("stale-cache")
    statistic = "c of sequences with cached tokens over that of others"
    if not of_hit.any():
        return None
    if not estimate.above(limit):
        return untested("stale-cache", statistic, estimate, limit, e.contract)
    why = (
        f"sequences whose prompt came from the prefix cache are {estimate.value:.1f} times worse "
        "than others of the same step: the cache was filled by older weights"
    )
    return diagnosis("stale-cache", statistic, estimate, limit, why, e.worst(e.size, of_hit))


def _from_cache(e: Evidence) -> Mask:
    """[S]; sequences with cached tokens that do not come from a sample of their own group."""
    return (e.run.cached_tokens > 0) & ~_computed_anew(e)


def _computed_anew(e: Evidence) -> Mask:
    """[S]; sequences without cached tokens, and the others of their groups, which share what the
    first sample computed with weights of the same step."""
    groups = _groups(e)
    return np.asarray(np.isin(groups, groups[e.run.cached_tokens == 0]))


def _by_group(e: Evidence) -> Diagnosis | Untested | None:
    """The test without counts of cached tokens. It holds if whole groups are broken, but no group
    of the first step, before which no weights were updated."""
    chance, threshold = chance_of_clean_start(e), e.contract.threshold
    if chance is None or chance > threshold("stale-cache.by-chance") or None in e.run.groups:
        return Untested(name="stale-cache", why="the dump has no counts of cached tokens")
    broken, first = broken_groups(e)[1], _groups_of_first_step(e)
    later = np.setdiff1d(np.arange(len(broken)), first)
    part = float(broken[later].mean())
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
    sure: Confidence = "moderate" if chance < threshold("stale-cache.sure") else "low"
    return diagnosis("stale-cache", statistic, estimate, limit, why, samples, sure)


def _groups_of_first_step(e: Evidence) -> Indices:
    """The numbers of the first step's groups; empty if the run has only one step."""
    steps = np.unique(e.run.steps)
    first = e.run.steps == steps[0]
    return np.unique(broken_groups(e)[0][first]) if len(steps) > 1 else np.empty(0, dtype=np.int64)


def chance_of_clean_start(e: Evidence) -> float | None:
    """Returns the probability that the first step has no broken group if groups break equally often
    at every step; None if the first step has a broken group, or if no group is broken."""
    broken, first = broken_groups(e)[1], _groups_of_first_step(e)
    if broken[first].any() or not broken.any():
        return None
    return float((1 - np.delete(broken, first).mean()) ** len(first))


def _groups(e: Evidence) -> Indices:
    """[S]; the number of each sequence's group. A sequence without a group's name has its own."""
    names = [
        f"{s} {g}" if g is not None else f"alone {k}"
        for k, (s, g) in enumerate(zip(e.run.steps, e.run.groups, strict=True))
    ]
    return np.asarray(np.unique(np.array(names), return_inverse=True)[1])


def broken_groups(e: Evidence) -> tuple[Indices, Mask]:
    """Returns the number of each sequence's group, [S], and for each group whether most of its
    sequences are outliers."""
    groups, part = _groups(e), e.contract.threshold("group.broken")
    return groups, np.bincount(groups, e.outliers) >= part * np.bincount(groups)


def duplicated(e: Evidence) -> Diagnosis | Untested | None:
    """Holds if the samples of a prompt are copies of one another."""
    if not e.contract.asks("duplicated"):
        return None
    result, limit = repeats(e.run, e.contract), e.contract.limit("duplicated")
    estimate = share(len(result.repeated), result.groups)
    if not estimate.above(limit):
        return None
    what = (
        f"in {len(result.repeated):,} of {result.groups:,} groups most samples repeat one another: "
        f"{result.samples:,} samples are {result.distinct:,} different answers"
    )
    if result.greedy:
        why = f"{what}, and hardly any of their tokens is improbable, as in greedy decoding"
        return Untested(name="duplicated", why=why)
    why = (
        f"{what}. By their own log-probs chance does so with a probability below "
        f"1e{max(result.chance, -300):.0f}: they were sampled with one seed, or copied. A group of "
        "one answer teaches nothing, and every interval here counts an answer once"
    )
    statistic = "share of groups whose samples repeat one another"
    indices = e.run.offsets[result.repeated] + e.run.prompt_lengths[result.repeated]
    return diagnosis("duplicated", statistic, estimate, limit, why, e.tokens(indices))


def decode_state(e: Evidence) -> Diagnosis | None:
    """Holds if some sequences are far worse than the others of their step."""
    limit = e.contract.limit("decode-state")
    count = int((e.outliers & e.distinct).sum())
    estimate = share(count, int(e.distinct.sum()))
    if count < 2 or not estimate.above(limit):
        return None
    groups, broken = broken_groups(e)
    shared = float(broken[groups[e.outliers]].mean())
    grouped = None not in e.run.groups
    of_prompt = shared > e.contract.threshold("decode-state.of-group")
    factor = e.contract.threshold("outlier.factor")
    how = "in most samples of their group" if of_prompt else "in single samples of their groups"
    how = how if grouped else "and the dump names no groups"
    # Counts of cached tokens, or a broken first step, exclude the prefix cache as the cause.
    uncounted = (e.run.cached_tokens == UNKNOWN).all()
    cache = of_prompt and uncounted and chance_of_clean_start(e) is not None
    which = (
        "either the rollout decoded them in a broken state, or their prompts came from a prefix "
        "cache of older weights. Counts of cached tokens would tell, or groups and several steps"
        if cache
        else "the rollout decoded them in a broken state (cache blocks, padding, a kernel's path "
        "for some lengths)"
    )
    why = (
        f"{count:,} of {int(e.distinct.sum()):,} sequences are more than {factor:g} times worse "
        f"than the median one of their step, {how}; {which}"
    )
    statistic = "share of sequences that are far off"
    samples = e.worst(e.size, ~e.usual)
    sure: Confidence = "high" if grouped and of_prompt and not cache else "moderate"
    return diagnosis("decode-state", statistic, estimate, limit, why, samples, sure)
