"""A verdict as a document: what is wrong, where, on which side, and what to do next; then the
figures and the evidence."""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.verdict import (
    PARITY_KINDS,
    OverBudget,
    Verdict,
    cached_rows,
    closest_limit,
    coverage,
    headline,
    over_budget,
    parity,
)
from rlk_align.judge.wording import why_legitimate
from rlk_align.probe.record import Probe
from rlk_align.report.distributions import distribution_sections
from rlk_align.report.document import DataTable, Document, Entry, Fact, Section, Tone
from rlk_align.report.document_markdown import document_markdown
from rlk_align.report.probe_units import probe_section
from rlk_align.report.routing_words import replay_lines, routing_lines
from rlk_align.report.sampling_distribution import sides_words
from rlk_align.report.source import ReportSource
from rlk_align.report.words import (
    EDGE_FIGURES,
    LONGER_PROMPTS,
    bounded,
    check_words,
    code_places,
    edge_figures,
    engine_spec,
    healthy_figures,
    how_words,
    mismatch_words,
    next_step,
    noise_law,
    noise_words,
    outcome,
    positions_words,
    production_words,
    rank_words,
    side_off,
    site_figures,
    whose_off,
)
from rlk_align.results import Comparison, EdgeResult, Introducer

_SHOWN = 8
"""The most names in one line; the rest is counted."""


def verdict_document(
    verdict: Verdict, folder: Path, probe: Probe | None = None, command: Sequence[str] = ()
) -> Document:
    """Returns the verdict on a run with the results of its probe. `command`: the command that made
    the run."""
    sentence, more = outcome(verdict)
    return Document(
        status=verdict.status,
        headline=sentence,
        text=more,
        folder=str(folder),
        facts=list(_facts(verdict)),
        sections=[*_measurements(verdict, probe), *problem_sections(verdict)],
        next_steps=_next(verdict, folder, probe),
        command=shlex.join(command),
    )


def source_document(source: ReportSource) -> Document:
    """Returns the verdict on a finished run; its text does not depend on the folder's location."""
    command = source.record.command
    return verdict_document(source.verdict, source.bare_path, source.probe, command)


def markdown(source: ReportSource) -> str:
    """Renders the comment on a pull request."""
    return document_markdown(source_document(source))


def _next(verdict: Verdict, folder: Path, probe: Probe | None) -> list[str]:
    step, edge = next_step(verdict, folder), headline(verdict)
    runs = not verdict.comparison.stopped and not verdict.comparison.not_recorded
    differs = edge is not None and edge.first_bitwise is not None and runs
    if probe is not None or not differs or "rlk-align probe" in step:
        return [step]
    where = shlex.quote(str(folder))
    return [step, f"see which operator introduced which difference: rlk-align probe {where}"]


def _facts(verdict: Verdict) -> Iterator[Fact]:
    c, contract = verdict.comparison, verdict.contract
    judged = f"{c.dtype}, {c.tokens:,} sampled tokens"
    yield Fact("contract", f"{contract.id} {contract.version}, {judged}")
    yield Fact("side", side_off(verdict))
    yield Fact("model", c.model)
    for side, e in c.engines.items():
        torch = e.environment.get("torch", "not recorded")
        yield Fact(side, f"{engine_spec(e)}  {e.version}, {e.dtype}, torch {torch}")
    yield Fact("precheck", ", ".join(f"{kind} {parity(c, kind)}" for kind in PARITY_KINDS))
    if distributions := sides_words(c):
        yield Fact("log-probs", distributions)
    if c.controls is not None:
        noise = ", ".join(f"{side} {noise_words(n)}" for side, n in c.controls.noise.items())
        detail = "".join(f"; {text}" for text in c.controls.observer_detail)
        yield Fact("controls", f"observer {c.controls.observer}{detail}; {noise}")
        paired, expected = coverage(c)
        yield Fact("coverage", f"{paired:,} of {expected:,} rows paired{_served(c)}")
        yield from _production(c)
    if verdict.status == "pass":
        yield from _evidence(verdict)
    beyond = verdict.breaches or verdict.waived
    worst = max(beyond, key=_badness, default=closest_limit(verdict))
    if worst is not None:
        share = f"; {worst.excess:.2g} × the limit" if math.isfinite(worst.excess) else ""
        which = "worst" if beyond else "closest"
        yield Fact(which, f"{check_words(worst)}{share}", "soft")


def _served(c: Comparison) -> str:
    served = cached_rows(c)
    return f"; {served:,} more served from the cache, not compared" if served else ""


def _badness(check: LimitCheck) -> tuple[bool, bool, float]:
    """The order of checks: a NaN is worst, and a multiple of a limit counts more than a limit of
    0."""
    return math.isnan(check.value), check.fail > 0, check.excess


def _production(c: Comparison) -> Iterator[Fact]:
    if c.production is None:
        yield Fact("", "production mode not measured (--production)", "soft")
        return
    largest, mean = c.production.max_abs_dlogp, c.production.mean_abs_dlogp
    figures = f"max |Δ| {largest:.2g}, mean |Δ| {mean:.2g}"
    yield Fact("", f"production against observed: {figures}")
    for name, found in c.production_passes.items():
        yield Fact("", f"  {name}: {production_words(found)}", "soft")


def _evidence(verdict: Verdict) -> Iterator[Fact]:
    """Yields the evidence of a pass: the tested positions, and how many rows are equal."""
    edges = [e for e in verdict.comparison.edges if e.name in verdict.comparison.judged]
    differ = sum(s.differ for e in edges for s in e.sites)
    rows = sum(s.rows for e in edges for s in e.sites)
    if tested := positions_words(verdict.comparison):
        yield Fact("tested", f"{tested}: {LONGER_PROMPTS}")
    if not differ:
        yield Fact("rows", f"all {rows:,} rows are bit-equal")
        return
    sites = {s.site for e in edges for s in e.sites if s.differ}
    yield Fact(
        "rows",
        f"{differ:,} of {rows:,} rows differ, at {len(sites)} sites: within the limits of "
        f"{verdict.contract.id}, not equal",
    )


def _measurements(verdict: Verdict, probe: Probe | None) -> Iterator[Section]:
    """Yields the measurements, in the order of a reader's questions."""
    c, edge = verdict.comparison, headline(verdict)
    if not c.stopped:
        if c.edges:
            yield _edges(verdict)
            yield from distribution_sections(c)
        if edge is not None:
            yield from _divergence(verdict, edge)
        for e in c.edges:
            yield from _lines(routing_lines(e, verdict.contract))
            if probe is not None and (replay := probe.replay(e.name)):
                yield from _lines(replay_lines(replay, e))
    if probe is not None and probe.left_out:
        yield Section(heading=f"graft passes omitted: {probe.left_out}", tone="doubt")
    for probed in probe.edges if probe else ():
        yield probe_section(verdict, probed)


def _lines(lines: Iterator[str]) -> Iterator[Section]:
    """Yields a section whose heading is the first line; nothing without lines."""
    for heading in lines:
        yield Section(heading=heading, items=[text.strip() for text in lines])


def _edges(verdict: Verdict) -> Section:
    """Returns a row for each edge and one for healthy models, then the law of noise."""
    rows = [[e.name, *edge_figures(e.metrics)] for e in verdict.comparison.edges]
    if healthy := healthy_figures(verdict):
        rows.append(["healthy models", *healthy])
    shown = headline(verdict)
    law = noise_law(verdict, shown) if shown is not None else ""
    return Section(
        heading="edges",
        table=DataTable(
            name="edges",
            caption="Δ is a token's log-prob in the second pass minus that in the first.",
            columns=("edge", *EDGE_FIGURES),
            rows=rows,
        ),
        items=[f"{shown.name}: {law}"] if shown is not None and law else [],
    )


def _divergence(verdict: Verdict, edge: EdgeResult) -> Iterator[Section]:
    first, over = edge.first_bitwise, over_budget(verdict, edge)
    if over:
        entries = [_operator(verdict, edge, operator) for operator in over]
        yield Section(heading=f"over budget ({edge.name})", items=entries)
    if first is not None:
        yield _introducer(verdict, edge, first)
    elif not over:
        equal = sum(not s.differ for s in edge.sites)
        yield Section(
            heading=f"first divergence ({edge.name}): none",
            items=[f"{equal} of {len(edge.sites)} sites equal", *_within_budgets(verdict, edge)],
        )


def _operator(verdict: Verdict, edge: EdgeResult, over: OverBudget) -> Entry:
    """States which side is off, how, and where the operator is in the code."""
    unit = over.unit
    off, *unchecked = whose_off(over).split("; ")
    details = [*unchecked, f"at sample {unit.sample}, position {unit.position}"]
    for u, (where, how) in zip(over.units, how_words(verdict, over), strict=True):
        details.append(f"{where}: {how}")
        if u.fused_with:
            details.append(f"computed together with {u.fused_with}: either may be the cause")
    for side, place, unlike in code_places(verdict, edge, unit.site):
        settings = f"; {', '.join(unlike[:_SHOWN])}" if unlike else ""
        details.append(f"{side:<8} {place}{settings}")
    if not over.units:
        details.append(site_figures(next(s for s in edge.sites if s.site == unit.site)))
    return Entry(title=unit.site, text=off, details=details)


def _within_budgets(verdict: Verdict, edge: EdgeResult) -> list[str]:
    units = [u for u in verdict.comparison.referee if edge.name in u.edges]
    if not units:
        return []
    done = f"{sum(u.errors is not None for u in units)} of {len(units)}"
    if not verdict.contract.budgets:
        return [f"{done} operators recomputed in float64; no budgets for them"]
    return [f"no operator beyond its budget on either side: {done} recomputed in float64"]


def _introducer(verdict: Verdict, edge: EdgeResult, unit: Introducer) -> Section:
    site, lines = next(s for s in edge.sites if s.site == unit.site), []
    if site.introduced:
        equal = f"; equal up to {unit.last_equal}" if unit.last_equal else ""
        lines.append(f"its inputs are bit-equal, its outputs are not{equal}")
    lines += filter(None, [rank_words(unit), site_figures(site)])
    lines += filter(None, [why_legitimate(verdict, edge, unit.site)])
    others = [s.site for s in edge.sites if s.introduced and s.site != unit.site]
    if others:
        lines.append(f"later units that add to it: {', '.join(bounded(others, _SHOWN))}")
    if edge.name == "decode_vs_prefill":
        lines.append("decode differs from prefill in the rollout engine itself")
    if not over_budget(verdict, edge):
        lines += _within_budgets(verdict, edge)
    where = f"at sample {unit.sample}, position {unit.position}"
    return Section(heading=f"first divergence ({edge.name}): {unit.site}  {where}", items=lines)


def problem_sections(verdict: Verdict) -> Iterator[Section]:
    """Yields lists of errors, near misses, excuses and doubts; lists without an entry are
    omitted."""
    c = verdict.comparison
    mismatches = [
        Entry(text=mismatch_words(m), details=[m.detail] if m.detail else []) for m in c.mismatches
    ]
    yield from _listed("mismatches before anything was computed", mismatches)
    yield from _listed("breaches", list(map(check_words, verdict.breaches)), "breach")
    yield from _listed("breaches that are waived", list(map(check_words, verdict.waived)))
    yield from _listed("near a limit", list(map(check_words, verdict.warnings)), "doubt")
    yield from _listed("waivers", [f"{use.state}: {use}" for use in verdict.waivers])
    yield from _listed("nothing can be concluded", verdict.doubts, "doubt")
    sites: dict[str, dict[str, None]] = {}
    for edge in c.edges:
        for site, reason, explained in edge.unpaired:
            if explained:
                sites.setdefault(reason, {})[site] = None
    unpaired = [
        f"unpaired {', '.join(bounded(list(named), _SHOWN))}: {reason}"
        for reason, named in sites.items()
    ]
    yield from _listed("notes", [*verdict.notes, *unpaired], "soft")


def _listed(heading: str, items: Sequence[Entry | str], tone: Tone = "") -> Iterator[Section]:
    """Yields a section with items; nothing without items."""
    if items:
        yield Section(heading=heading, items=items, tone=tone)
