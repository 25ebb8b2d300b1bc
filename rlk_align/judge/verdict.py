"""Judges a comparison by a contract; needs neither an engine nor torch."""

from collections.abc import Iterable, Iterator
from datetime import date
from typing import Literal, TypeVar

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from rlk_align.judge.budgets import budget_of
from rlk_align.judge.checks import (
    LimitCheck,
    applies,
    check_edge,
    judged_count,
    judged_metrics,
    limits_of,
    mark_alike,
    quantised_between,
)
from rlk_align.judge.contract import LAW_METRICS, Contract
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.judge.waivers import WaiverUse, today, waive
from rlk_align.results import (
    Comparison,
    EdgeResult,
    Introducer,
    Noise,
    RefereedUnit,
    Result,
    SiteResult,
)

PARITY_KINDS = ("tokens", "weights", "attributes")

Status = Literal["pass", "fail", "inconclusive"]
EXIT_CODES = {"pass": EXIT_PASS, "fail": EXIT_FAIL, "inconclusive": EXIT_INCONCLUSIVE}


class Verdict(Result):
    """Whether the two policies are the same by a contract, and the evidence for it."""

    status: Status
    exit_code: int
    contract: Contract
    comparison: Comparison
    checks: list[LimitCheck]
    """A check for every limit on every judged edge; empty where the precheck stopped the
    comparison."""
    doubts: list[str]
    """Reasons for which nothing can be concluded."""
    notes: list[str]
    """What a reader should know about the judged values."""
    waivers: list[WaiverUse]
    """The contract's waivers and their states."""

    @property
    def breaches(self) -> list[LimitCheck]:
        """The values beyond a limit, without waived ones."""
        return [check for check in self.checks if check.outcome == "fail"]

    @property
    def warnings(self) -> list[LimitCheck]:
        """The values that are within their limits, but near them."""
        return [check for check in self.checks if check.outcome == "warn"]

    @property
    def waived(self) -> list[LimitCheck]:
        """The values beyond a limit that a waiver excuses."""
        return [check for check in self.checks if check.outcome == "waived"]

    @property
    def expired(self) -> list[WaiverUse]:
        return [use for use in self.waivers if use.state == "expired"]


def judge(comparison: Comparison, contract: Contract, day: date | None = None) -> Verdict:
    """Judges a comparison by a contract on a day; None means today. A doubt outweighs a breach. A
    breach or an expired waiver outweighs a pass. Raises ContractError where the contract does not
    fit the compared sites."""
    doubts = list(doubts_of(comparison, contract))
    checks: list[LimitCheck] = []
    if not comparison.stopped:
        for edge in comparison.edges:
            if edge.name in comparison.judged:
                checks += check_edge(edge, comparison, contract)
    checks, uses = waive(mark_alike(checks, contract), contract.waivers, day or today())
    if not any(c.outcome == "fail" for c in checks):
        doubts += _alike(checks)
    status: Status = "pass"
    if doubts:
        status = "inconclusive"
    elif any(c.outcome == "fail" for c in checks) or any(u.state == "expired" for u in uses):
        status = "fail"
    return Verdict(
        status=status,
        exit_code=EXIT_CODES[status],
        contract=contract,
        comparison=comparison,
        checks=checks,
        doubts=doubts,
        notes=_notes(comparison, contract),
        waivers=uses,
    )


def judge_by(comparison: Comparison, contract: Contract | str | None) -> Verdict:
    """Judges a comparison by a contract, given as a value, an id or a file; None means the built-in
    contract of the comparison's dtype. Raises ContractError."""
    if not isinstance(contract, Contract):
        contract = load_contract(contract or default_contract(comparison.dtype), comparison.dtype)
    return judge(comparison, contract)


def _alike(checks: Iterable[LimitCheck]) -> Iterator[str]:
    """Yields a doubt for each operator whose budget both sides exceed alike."""
    by_site: dict[str | None, dict[tuple[str, str | None], LimitCheck]] = {}
    for check in checks:
        if check.outcome == "alike":
            by_site.setdefault(check.site, {})[check.side or "", check.passname] = check
    for site, found in by_site.items():
        figures = sorted(check.size for check in found.values())
        fails = max(check.fail for check in found.values())
        metric = next(iter(found.values())).metric.removeprefix("rounding_")
        yield (
            f"{site}: both sides exceed the budget alike, {metric} {figures[0]:.3g} to "
            f"{figures[-1]:.3g} roundings where {fails:.3g} is allowed: a wrong unit is more "
            "likely than two wrong sides"
        )


Cause = Literal["operator", "drift", "none"]


def cause_of(verdict: Verdict) -> Cause | None:
    """Returns the cause of a verdict: an operator that is further from exact than its budget
    allows, drift beyond the contract that no operator explains, or none. Returns None where nothing
    was concluded."""
    if verdict.status == "inconclusive":
        return None
    c = verdict.comparison
    if any(over_budget(verdict, e) for e in c.edges if e.name in c.judged):
        return "operator"
    return "drift" if verdict.breaches else "none"


_SIDES = {"rollout": "rollout", "train": "training"}


def parity(comparison: Comparison, kind: str) -> str:
    """Returns `equal`, `mismatch` or `mismatch allowed`; or, for weights that one side holds
    rounded, e.g. `cast to bfloat16 on the rollout side`, and for weights with an adapter merged
    into them or that are quantised, e.g. `merged on the rollout side`."""
    if not any(m.kind == kind and m.stops for m in comparison.mismatches):
        lacking = [_SIDES[s] for s, kinds in comparison.not_recorded.items() if kind in kinds]
        if lacking:
            return f"not recorded on the {' and the '.join(lacking)} side"
        sides = (("rollout", "rollout"), ("training", "train"))
        explained = [m for m in comparison.mismatches if m.kind == kind == "weights"]
        for state in ("merged", "quantised"):
            having = [who for who, s in sides if any(getattr(m, s) == state for m in explained)]
            if having:
                return f"{state} on the {' and the '.join(having)} side"
        casts = comparison.casts.items() if kind == "weights" else ()
        words = [f"to {dtype} on the {_SIDES[side]} side" for side, dtype in casts]
        return f"cast {' and '.join(words)}" if words else "equal"
    return "mismatch allowed" if kind in comparison.allowed else "mismatch"


def coverage(comparison: Comparison) -> tuple[int, int]:
    """Returns the numbers of paired and of expected rows over the judged edges."""
    edges = [e for e in comparison.edges if e.name in comparison.judged]
    return sum(e.paired_rows for e in edges), sum(e.expected_rows for e in edges)


def cached_rows(comparison: Comparison) -> int:
    """Returns the number of rows of the judged edges that a side took from its cache."""
    return sum(e.cached_rows for e in comparison.edges if e.name in comparison.judged)


def doubts_of(c: Comparison, contract: Contract) -> list[str]:
    """Returns the reasons why nothing can be concluded from a comparison by a contract."""
    if c.stopped:
        kinds = dict.fromkeys(m.kind for m in c.stopping)
        return [f"precheck: {', '.join(kinds)} differ between the sides"]
    doubts = [
        f"{side} was imported from files that lack its {' and '.join(kinds)}"
        for side, kinds in c.not_recorded.items()
    ]
    doubts += _noise(c, contract)
    doubts += [f"{name} was not compared: {why}" for name, why in c.missing_edges.items()]
    paired, expected = coverage(c)
    if not paired >= contract.min_coverage * expected or not paired:
        doubts.append(f"coverage: {paired} of {expected} rows paired")
    for edge in c.edges:
        if edge.name in c.judged:
            limits = limits_of(edge, c, contract)
            judged = judged_metrics(edge, c, contract)
            by_operator = bool(contract.budgets) and bool(quantised_between(edge, c))
            if not by_operator and not any(applies(x, edge, judged, contract) for x in limits):
                doubts.append(
                    f"contract {contract.id} applies no limit to {edge.name}, which has "
                    f"{judged.tokens} "
                    "sampled tokens"
                )
            doubts += _no_law(edge, c, contract)
            doubts += [
                f"{edge.name}: {site}: {reason}"
                for site, reason, explained in edge.unpaired
                if not explained
            ]
            if not edge.metrics.tokens >= contract.min_tokens:
                doubts.append(
                    f"{edge.name}: {edge.metrics.tokens} sampled tokens, "
                    f"{contract.min_tokens} are needed"
                )
    if c.controls is None or c.controls.observer in ("violated", "not measured"):
        detail = "; ".join(c.controls.observer_detail) if c.controls else "no control"
        doubts.append(f"observer: {detail}")
    return doubts


def _no_law(edge: EdgeResult, c: Comparison, contract: Contract) -> Iterator[str]:
    """Yields a doubt where the contract limits the noise of tokens, but the run has no such
    figures."""
    judged = judged_metrics(edge, c, contract)
    asked = [x for x in limits_of(edge, c, contract) if x.metric in LAW_METRICS]
    if (
        judged.tokens
        and judged.noise is None
        and any(x.judges(edge.name, judged.tokens) for x in asked)
    ):
        yield (
            f"{edge.name}: the run does not hold {asked[0].metric}, which contract {contract.id} "
            "limits: it was made by an older version; gate it with --recompute"
        )


def _noise(c: Comparison, contract: Contract) -> Iterator[str]:
    """Yields a doubt for each side that does not repeat itself: its figures change each time."""
    for side, noise in (c.controls.noise if c.controls else {}).items():
        if noise == "not measured" and contract.max_noise is None:
            yield f"it was not measured whether {side} repeats itself"
        # `not <=`: a NaN is the worst noise of all.
        if isinstance(noise, Noise) and (
            contract.max_noise is None or not noise.max_abs_dlogp <= contract.max_noise
        ):
            yield (
                f"{side} does not repeat itself: {noise.passname}, run twice, differs in "
                f"{noise.rows:,} rows, first at {noise.first_site}, and in log-prob by up to "
                f"{noise.max_abs_dlogp:.2g}"
            )


_OF_ENVIRONMENT = {
    "untested": "",
    "known_faults": "known fault of ",
    "cuts": "its own kernels cut numbers off ",
}
"""Keys of a side's environment that are noted -> what is said before their value."""


def _notes(c: Comparison, contract: Contract) -> list[str]:
    """Returns notes on untested versions, known faults of engines, kernels that cut numbers off,
    different versions of torch on
    the two sides, one capture for both sides, and rows on which no operator's limit was checked
    because their values were not kept or are noisy."""
    notes = [
        f"{role}: {words}{e.environment[name]}"
        for name, words in _OF_ENVIRONMENT.items()
        for role, e in c.engines.items()
        if name in e.environment
    ]
    chats = {e.environment.get("chat_template") for e in c.engines.values()} - {None}
    notes += [f"{count} rendered by the model's chat template" for count in sorted(map(str, chats))]
    if c.same_capture:
        notes.append("both sides are the same capture, so their agreement proves nothing")
    versions = [e.environment.get("torch", "") for e in c.engines.values()]
    if len(set(versions)) > 1:
        roles = [f"{role} {v}" for role, v in zip(c.engines, versions, strict=True)]
        notes.append(f"two versions of torch: {', '.join(roles)}; its own kernels may differ")
    if contract.sequences and c.longest_response > contract.sequences.tokens:
        notes.append(
            f"responses of up to {c.longest_response:,} tokens: the limits were chosen for "
            f"{contract.sequences.tokens:,}, and drift adds up along a sequence"
        )
    notes += [
        f"{side}: its weights were not recorded, so its operators are recomputed with those of "
        f"{c.engines[side].model}: one beyond its budget has another weight, or computes something "
        "else"
        for side, kinds in c.not_recorded.items()
        if "weights" in kinds
    ]
    notes += _quantisation(c, contract)
    notes += _excluded_flips(c, contract)
    notes += _skipped_limits(c, contract)
    notes += _distributions(c, contract)
    unrefereed = [u for u in c.referee if u.errors is None]
    if contract.budgets and c.edges and not c.referee:
        notes.append("no operator was checked against float64")
    if unrefereed and contract.budgets:
        first = unrefereed[0]
        notes.append(
            f"{len(unrefereed)} of {len(c.referee)} operators were not checked against float64, "
            f"from {first.side} {first.passname} {first.site} on: {first.reason}"
        )
    if not any(limit.metric == "op_error" for limit in contract.limits):
        return notes
    for edge in c.edges:
        if edge.name not in c.judged:
            continue
        valued, rows = (
            sum(getattr(s, n) for s in edge.sites) for n in ("introduced_valued", "introduced")
        )
        if valued < rows:
            sites = [s.site for s in edge.sites if s.introduced_valued < s.introduced]
            notes.append(
                f"{edge.name}: operator limits were checked against the values of {valued:,} of "
                f"{rows:,} rows, and for the others only against their largest entries, from "
                f"{sites[0]} on: a larger --trace-budget keeps more"
            )
        noisy = [s.site for s in edge.sites if s.noisy]
        if noisy:
            notes.append(
                f"{edge.name}: operator limits were not checked against noisy rows, from "
                f"{noisy[0]} on"
            )
    return notes


def _quantisation(c: Comparison, contract: Contract) -> Iterator[str]:
    """Yields a note for each edge between sides that differ by their quantised weights, with what
    these do to log-probs."""
    for edge in c.edges:
        formats = quantised_between(edge, c)
        if not formats or edge.name not in c.judged:
            continue
        limits = [x.id for x in limits_of(edge, c, contract) if x.quantisation is not None]
        judged_by = ", ".join(limits) or "no limit of this contract"
        yield (
            f"{edge.name}: the sides differ by quantisation ({', '.join(formats)}), which "
            f"{judged_by} judges: mean |Δ| {edge.metrics.mean_abs_dlogp:.2g}, p99 "
            f"{edge.metrics.p99_abs_dlogp:.2g}, k3 {edge.metrics.k3:.2g}; each side's operators "
            "are judged by its own stored weights"
        )


def _excluded_flips(c: Comparison, contract: Contract) -> Iterator[str]:
    """Yields a note for each edge whose limits on log-probs exclude flipped tokens."""
    for edge in c.edges:
        judged = judged_metrics(edge, c, contract)
        excluded = edge.metrics.tokens - judged.tokens
        if edge.name in c.judged and excluded:
            yield (
                f"{edge.name}: limits on log-probs were checked against the {judged.tokens:,} "
                "tokens that both sides send to the same experts, max |Δ| "
                f"{judged.max_abs_dlogp:.2g}; the {excluded:,} others count apart"
            )


def _skipped_limits(c: Comparison, contract: Contract) -> Iterator[str]:
    """Yields a note for each edge with limits that need more tokens than it has."""
    for edge in c.edges:
        limits = limits_of(edge, c, contract) if edge.name in c.judged else []
        judged = judged_metrics(edge, c, contract)
        counts = [(x, judged_count(x, edge, judged)) for x in limits]
        short = [
            (x, count)
            for x, count in counts
            # Another note says of too few logits.
            if count < x.min_tokens
            and x.judges(edge.name, x.min_tokens)
            and (not x.of_distribution or count >= contract.min_tokens)
        ]
        if short:
            fewest, most = min(n for _, n in short), max(x.min_tokens for x, _ in short)
            yield (
                f"{edge.name}: limits not applied: {len(short)}; {fewest:,} tokens are too few, up "
                f"to {most:,} are needed"
            )


def _distributions(c: Comparison, contract: Contract) -> Iterator[str]:
    """Yields a note for each edge whose distributions were not compared at all sampled positions,
    if the contract limits them."""
    for edge in c.edges:
        limits = limits_of(edge, c, contract) if edge.name in c.judged else []
        found = edge.distribution
        if found is None or not found.missing or not any(x.of_distribution for x in limits):
            continue
        of = f"{found.positions:,} of {found.positions + found.missing:,} sampled positions"
        too_few = found.positions < contract.min_tokens
        yield (
            f"{edge.name}: both sides keep the logits of {of}"
            + (": limits on distributions not applied" if too_few else "")
            + "; a larger --trace-budget keeps more"
        )


def closest_limit(verdict: Verdict) -> LimitCheck | None:
    """Returns the check that comes closest to its limit; None where all limits are 0."""
    return max((c for c in verdict.checks if c.fail), key=lambda c: c.excess, default=None)


def headline(verdict: Verdict) -> EdgeResult | None:
    """Returns the edge that reports name first.

    Among the edges in breach it is the one furthest over its limits; decode_vs_train, which
    combines the other two, only where no other is in breach. Without a breach it is the first edge
    with a difference. `prefill_vs_train` precedes the others.
    """
    c = verdict.comparison
    edges = sorted(
        (e for e in c.edges if e.name in c.judged), key=lambda e: e.name != "prefill_vs_train"
    )
    excess: dict[str, float] = {}
    for breach in verdict.breaches:
        excess[breach.edge] = max(excess.get(breach.edge, 0.0), breach.excess)
    if len(excess) > 1:
        excess.pop("decode_vs_train", None)
    if excess:
        return max((e for e in edges if e.name in excess), key=lambda e: excess[e.name])
    return next((e for e in edges if e.first_bitwise), edges[0] if edges else None)


Off = Literal["rollout", "train", "both", "neither"]


class OverBudget(Result):
    """An operator that exceeds its budget or its limit."""

    unit: Introducer
    side: Off | None
    """The side whose outputs are off; `neither` where both sides are within their budgets, but too
    far from each other; None where the outputs could not be recomputed."""
    units: list[RefereedUnit]
    """The recomputed units of the sides that are off."""
    unchecked: list[RefereedUnit]
    """The unit of each side that could not be recomputed, with the reason."""


def over_budget(verdict: Verdict, edge: EdgeResult) -> list[OverBudget]:
    """Returns in execution order the units of an edge that are further from float64 than their
    budgets allow (also units that one side alone shows), that introduced an error beyond their
    limit, or that introduced a NaN or an infinity."""
    breaches = _by_site(b for b in verdict.breaches if b.edge == edge.name)
    refereed = _by_site(u for u in verdict.comparison.referee if edge.name in u.edges)
    over: list[OverBudget] = []
    for at, name, site in _in_order(edge, refereed):
        here = breaches.get(name, [])
        passes = {(b.side, b.passname) for b in here if b.side is not None}
        sides = {side for side, _ in passes}
        units = refereed.get(name, [])
        off = [u for u in units if (u.side, u.passname) in passes]
        cell = (site.first_nonfinite or site.first_introduced) if site else None
        if not off and not (cell and any(b.metric in _INTRODUCED for b in here)):
            continue
        side: Off | None = "both" if len(sides) > 1 else next(iter(sides), None)
        judged = units and all(u.errors and budget_of(verdict.contract, u) for u in units)
        if side is None and judged:
            side = "neither"
        unchecked = [u for u in units if u.errors is None and u.side not in sides]
        if any(u.other_weight for u in unchecked):
            # The checkpoint does not say what the two weights should give.
            side = None
        worst = next((u.errors.row for u in off if u.errors is not None), None)
        cell = cell or worst
        assert cell is not None
        unit = Introducer.among(edge.sites[:at], site or off[0], cell)
        over.append(OverBudget(unit=unit, side=side, units=off, unchecked=unchecked))
    return over


def _in_order(
    edge: EdgeResult, refereed: Iterable[str | None]
) -> Iterator[tuple[int, str, SiteResult | None]]:
    """Yields (number of paired sites computed before it, site, its result) for each site that an
    edge pairs, and for each recomputed site that one side alone shows, which has no result."""
    number = {s.site: at for at, s in enumerate(edge.sites)}
    alone: dict[int, list[str]] = {}
    before = 0
    for name in filter(None, refereed):
        if name in number:
            before = number[name] + 1
        else:
            alone.setdefault(before, []).append(name)
    for at in range(len(edge.sites) + 1):
        yield from ((at, name, None) for name in alone.get(at, []))
        yield from ((at, s.site, s) for s in edge.sites[at : at + 1])


OfSite = TypeVar("OfSite", LimitCheck, RefereedUnit)


def _by_site(items: Iterable[OfSite]) -> dict[str | None, list[OfSite]]:
    by_site: dict[str | None, list[OfSite]] = {}
    for item in items:
        by_site.setdefault(item.site, []).append(item)
    return by_site


_INTRODUCED = ("op_error", "nonfinite")
"""The metrics of a site that measure what it introduced itself."""
