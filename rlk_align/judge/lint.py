"""Finds errors of a contract: limits that can never fire, that contradict each other, or that lie
below the measured values of healthy engines; and sites that no model has."""

import math
from collections.abc import Iterator
from datetime import date
from fnmatch import fnmatchcase

from rlk_align.judge.contract import Contract, Limit
from rlk_align.judge.waivers import today
from rlk_align.model.operators import OPERATORS
from rlk_align.results import CLIP_HIGH, CLIP_LOW, Result

_MANY = 10_000_000
"""More tokens than a comparison has: at this number a limit with a tail is at its loosest."""


class Finding(Result):
    """One error."""

    entry: str
    """The id of the limit, the budget or the waiver; empty for the contract as a whole."""
    text: str


def lint(contract: Contract, day: date | None = None) -> list[Finding]:
    """Returns all findings; `day` is today if None."""
    findings: list[Finding] = []
    for dtype in contract.dtypes:
        limits = contract.limits_for(dtype)
        for finding in (*_never(limits), *_too_few_tokens(limits, contract)):
            if finding not in findings:
                findings.append(finding)
    findings += [*_below_noise(contract), *_sequences(contract), *_no_such_sites(contract)]
    findings += _says_nothing(contract)
    for waiver in contract.waivers:
        if waiver.expires < (day or today()):
            text = f"the waiver of {waiver.owner} expired on {waiver.expires}"
            findings.append(Finding(entry=waiver.limit, text=text))
    return findings


def _largest(metric: str, most: float) -> float:
    """Returns the largest value that a metric of tokens can have where no |Δ| is above `most`."""
    try:
        grown = math.expm1(most)
    except OverflowError:
        return math.inf
    return {
        "max_abs_dlogp": most,
        "mean_abs_dlogp": most,
        "p99_abs_dlogp": most,
        "p999_abs_dlogp": most,
        # Both rise with |Δ|, and faster above 0 than below.
        "k3": grown - most,
        "ratio_mean_error": grown,
        "token_mult_prob_error": grown + 1,
        "clip_fraction": 0.0 if most <= min(math.log(CLIP_HIGH), -math.log(CLIP_LOW)) else 1.0,
        "bit_mismatches": math.inf if most else 0.0,
        # The mean ratio is bounded; a |Δ| divided by a small 1 − p is not.
        "ratio_bias": grown,
        "noise_c": math.inf if most else 0.0,
        "excess": math.inf if most else 0.0,
    }[metric]


def _never(limits: list[Limit]) -> Iterator[Finding]:
    """Finds limits that no value can reach, and limits before which another one always fires."""
    shares = ("clip_fraction", "total_variation", "top1_disagreement", "top20_disagreement")
    of_edges = [x for x in limits if not x.of_site]
    for limit in of_edges:
        if limit.metric in shares and limit.fail >= 1:
            yield Finding(
                entry=limit.id, text="a share is never above 1, so this limit can never fire"
            )
            continue
        for other in of_edges:
            if other is limit or not _wherever(limit, other):
                continue
            # What sampled tokens show leaves open what the other tokens do.
            of_tokens = not limit.of_distribution
            if of_tokens and other.metric == "bit_mismatches" and other.fail == 0:
                if limit.metric == "bit_mismatches":
                    continue
                text = f"equal bits ({other.id}) leave no difference, so this limit can never fire"
                yield Finding(entry=limit.id, text=text)
            if of_tokens and other.metric == "max_abs_dlogp":
                most = other.fail_at(_MANY)
                reached = _largest(limit.metric, most)
                if limit.metric != "max_abs_dlogp" and reached <= limit.fail:
                    text = (
                        f"where no |Δ| is above {most:g} ({other.id}), {limit.metric} is at most "
                        f"{reached:.3g}: a limit of {limit.fail:g} can never fire"
                    )
                    yield Finding(entry=limit.id, text=text)
            quantiles = (limit.metric, other.metric) == ("p99_abs_dlogp", "p999_abs_dlogp")
            if quantiles and limit.fail >= other.fail:
                text = f"p99 is never above p99.9 ({other.id}, {other.fail:g}): it can never fire"
                yield Finding(entry=limit.id, text=text)
            if limit.metric == other.metric and other.fail < limit.fail:
                text = f"{other.id} is tighter, so this limit can never fire alone"
                yield Finding(entry=limit.id, text=text)


def _wherever(limit: Limit, other: Limit) -> bool:
    """Whether `other` applies wherever `limit` does."""
    if other.min_tokens > limit.min_tokens:
        return False
    return other.edges is None or (limit.edges is not None and set(limit.edges) <= set(other.edges))


def _too_few_tokens(limits: list[Limit], contract: Contract) -> Iterator[Finding]:
    """Finds limits on a quantile of so few tokens that it is their largest value, which has a limit
    already."""
    for limit in limits:
        needed = {"p99_abs_dlogp": 100, "p999_abs_dlogp": 1000}.get(limit.metric, 0)
        tokens = max(limit.min_tokens, contract.min_tokens)
        if tokens < needed:
            text = (
                f"of {tokens} tokens {limit.metric} is hardly less than the largest value: give it "
                f"min_tokens = {needed}"
            )
            yield Finding(entry=limit.id, text=text)


def _below_noise(contract: Contract) -> Iterator[Finding]:
    for limit in contract.limits:
        if limit.healthy is not None and limit.fail < limit.healthy:
            text = f"healthy pairs were measured at {limit.healthy:g}: {limit.fail:g} is below that"
            yield Finding(entry=limit.id, text=text)
        noise = contract.max_noise or 0.0
        if limit.metric == "max_abs_dlogp" and limit.fail < noise:
            text = (
                f"a side may be {noise:g} from itself (max_noise), and {limit.fail:g} is below it"
            )
            yield Finding(entry=limit.id, text=text)
    for budget in contract.budgets:
        # A copy is exact; every computed output is rounded at least once.
        exact = all(OPERATORS[op].formula == "embedding" for op in budget.ops)
        if not (exact and not budget.op_classes) and budget.rms < 1:
            text = f"rms {budget.rms:g}: an exact result, rounded once, has 1"
            yield Finding(entry=budget.id, text=text)
        if budget.row_rms < budget.rms:
            text = f"row_rms, the largest of a row, is never below rms, {budget.rms:g}"
            yield Finding(entry=budget.id, text=text)


def _sequences(contract: Contract) -> Iterator[Finding]:
    if contract.sequences is None:
        return
    ess = sequence_ess(contract, contract.sequences.tokens)
    if not ess >= contract.sequences.ess:
        text = (
            f"at its limit of k3, sequences of {contract.sequences.tokens:,} tokens keep an "
            f"effective sample size of {ess:.2g}, not {contract.sequences.ess:g}"
        )
        yield Finding(entry="", text=text)


_LAYERS = 1000
"""More layers than a model has."""


def _no_such_sites(contract: Contract) -> Iterator[Finding]:
    """Finds patterns that match no site of any model."""
    whole = [name for name, operator in OPERATORS.items() if operator.part is None]
    inner = dict.fromkeys(o.site for o in OPERATORS.values() if o.part is not None)
    sites = whole + [f"layers.{i}.{name}" for i in range(_LAYERS) for name in inner]
    names = dict.fromkeys(o.site for o in OPERATORS.values())
    named = [(x.id, x.sites) for x in contract.limits]
    named += [(w.limit, w.sites) for w in contract.waivers]
    for entry, patterns in named:
        for pattern in patterns or ():
            if not any(fnmatchcase(site, pattern) for site in sites):
                text = f"{pattern} is not a site of any model; operators are {', '.join(names)}"
                yield Finding(entry=entry, text=text)


def _says_nothing(contract: Contract) -> Iterator[Finding]:
    """Finds operators of models that no budget and no limit covers, where others are covered."""
    # Routing exists in sparse models alone: a comparison of one reports a missing budget.
    operators = {
        (f"layers.0.{o.site}" if o.part else o.site, o.site, o.op_class): None
        for o in OPERATORS.values()
        if o.op_class != "routing"
    }
    for dtype in contract.dtypes:
        for site, missing in contract.uncovered(contract.limits_for(dtype), list(operators)):
            op = site.rpartition(".")[2]
            text = f"it limits operators in {dtype}, and has no limit for {op}: add {missing}"
            yield Finding(entry="", text=text)


def sequence_ess(contract: Contract, tokens: int) -> float:
    """Returns the effective sample size per sequence of this many tokens where k3 is at its limit:
    exp(−Tσ²), with σ² = 2 · k3 for small Δ that are independent along the sequence. NaN where k3
    has no limit."""
    bounds = [x.fail for x in contract.limits if x.metric == "k3"]
    return math.exp(-tokens * 2 * max(bounds)) if bounds else math.nan
