"""Compares two traces, one of which may have a fault, and checks the result against the fault."""

from dataclasses import dataclass

from rlk_align.compare.divergence import Edge, Side, compare_edges
from rlk_align.compare.measure import measure
from rlk_align.engines.spec import EngineSpec
from rlk_align.judge.verdict import Verdict, judge_by, over_budget
from rlk_align.judge.wording import how_off
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.probe.explain_logprobs import explain_pass
from rlk_align.probe.referee.referee import referee
from rlk_align.progress import Progress
from rlk_align.results import EdgeName, SideName
from rlk_align.selftest.faults.fault import Fault
from rlk_align.selftest.plan import Case
from rlk_align.selftest.record import Detection, Outcome
from rlk_align.trace.reader import Trace


def verdict_of(rollout: Trace, train: Trace, edge: EdgeName, progress: Progress) -> Verdict:
    """Judges one edge of two traces by the built-in contract of its dtype, with a referee."""
    comparison, _ = measure(rollout, train, (edge,), (), progress)
    units = referee(comparison, rollout, train, progress)
    return judge_by(comparison.model_copy(update={"referee": units}), None)


def alarms(verdict: Verdict) -> list[str]:
    """Returns what a verdict blames: mismatches that stop it, and operators over their budgets."""
    blamed = [f"{m.kind} {m.name}" for m in verdict.comparison.mismatches if m.stops]
    for edge in verdict.comparison.edges:
        blamed += [f"{o.unit.site} of {o.side}" for o in over_budget(verdict, edge)]
    return blamed


def detection(
    case: Case,
    faulty: Trace,
    clean: Trace,
    pair: tuple[EngineSpec, EngineSpec],
    side: SideName,
    planted: str | None,
    progress: Progress,
) -> Detection:
    """Compares a fault on this side of a pair, and returns the result."""
    fault = case.chosen.fault
    traces = (faulty, clean) if side == "rollout" else (clean, faulty)
    edge: EdgeName = "decode_vs_train" if fault.decode else "prefill_vs_train"
    verdict = verdict_of(*traces, edge, progress)
    finding = _finding(verdict, fault, side)
    words = finding.words
    if fault.op_class == "logprob":
        words = explain_pass(faulty, "prefill").words
    return Detection(
        fault=case.chosen.name,
        op_class=fault.op_class,
        strength=case.chosen.strength,
        unit=fault.strength.unit if fault.strength else "",
        expected=fault.expected,
        curve=case.curve,
        rollout=str(pair[0]),
        train=str(pair[1]),
        side=side,
        site=fault.site,
        planted=planted,
        seen=finding.outcome,
        found_site=finding.site,
        found_side=finding.side,
        words=words,
        others=finding.others,
        metrics=next((e.metrics for e in verdict.comparison.edges), None),
    )


@dataclass(frozen=True, slots=True)
class _Finding:
    outcome: Outcome
    site: str | None
    side: str | None
    words: str
    others: list[str]


def _finding(verdict: Verdict, fault: Fault, side: SideName) -> _Finding:
    every = verdict.comparison.mismatches
    mismatches = [m for m in every if m.stops or m.name == fault.mismatch]
    if mismatches:
        named = [m for m in mismatches if m.name == fault.mismatch]
        others = [m.name for m in mismatches if m.kind != mismatches[0].kind]
        reported = (named or mismatches)[0]
        return _Finding(
            "precheck" if named else "misnamed", reported.name, None, reported.detail, others
        )
    if not verdict.comparison.edges:
        return _Finding("missed", None, None, "", [])
    over = over_budget(verdict, verdict.comparison.edges[0])
    faulty = (*fault.sites, *fault.also_at)
    others = [f"{o.unit.site} of {o.side}" for o in over if o.unit.site not in faulty]
    if not over:
        outcome: Outcome = "within budget" if fault.expected == "rounding" else "missed"
        return _Finding(outcome, None, None, "", [])
    first = over[0]
    words = "; ".join(how_off(u, verdict.contract) for u in first.units)
    if first.unit.site != fault.site:
        # If a later operator with the fault is named, the first one was missed.
        outcome = "missed" if first.unit.site in fault.sites else "misnamed"
    else:
        outcome = "named" if first.side == side else "wrong side"
    return _Finding(outcome, first.unit.site, first.side, words, others)


def first_difference(clean: Trace, faulty: Trace, passname: str) -> str | None:
    """Returns the first operator, in execution order, at which an engine with a fault differs from
    the same engine without it, among rows with equal inputs; None if there is none."""
    index = RowIndex(clean.tokens)
    a = Side(clean.record.engine, "rollout", clean.read_pass(passname), None)
    b = Side(faulty.record.engine, "train", faulty.read_pass(passname), None)
    # After another sampled token it is another sequence.
    same = index.prefix_all(index.same_tokens(faulty.tokens))
    edge = Edge("prefill_vs_train", a, b, passname == "decode", same)
    sites = model_sites(clean.record.shape)
    (result,), _ = compare_edges([edge], sites, index, lambda *_: None)
    return None if result.first_bitwise is None else result.first_bitwise.site


def first_shown(site: str, trace: Trace, passname: str) -> str | None:
    """Returns the first operator from this site on, in execution order, that the engine can show;
    None if there is none."""
    hidden = trace.read_pass(passname).record.unexposed
    names = [s.name for s in model_sites(trace.record.shape)]
    return next((n for n in names[names.index(site) :] if n not in hidden), None)
