"""The verdict on a terminal or in a CI log: what a tired engineer reads in five seconds."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.verdict import (
    PARITY_KINDS,
    OverBudget,
    Verdict,
    closest_limit,
    coverage,
    headline,
    over_budget,
    parity,
)
from rlk_align.judge.wording import why_legitimate
from rlk_align.probe.record import Probe
from rlk_align.report.columns import columns
from rlk_align.report.document_terminal import STYLES
from rlk_align.report.probe_units import probe_lines
from rlk_align.report.routing_words import replay_lines, routing_lines
from rlk_align.report.words import (
    EDGE_FIGURES,
    LONGER_PROMPTS,
    cause_words,
    code_places,
    edge_figures,
    engine_spec,
    healthy_figures,
    how_words,
    mismatch_words,
    next_step,
    noise_law,
    noise_words,
    parting_words,
    positions_words,
    production_words,
    rank_words,
    site_figures,
    whose_off,
)
from rlk_align.results import Comparison, EdgeResult, Introducer
from rlk_align.text import line

_SHOWN = 8
"""Entries of a list that are printed; the rest is counted."""
_WIDTH = 100
"""Columns of a line that could be two."""


def show(verdict: Verdict, folder: Path, console: Console, probe: Probe | None = None) -> None:
    """Prints a verdict, and what a probe added to it. Whatever comes from a run is printed as
    text, not as markup."""
    c = verdict.comparison
    head = line(f" {verdict.status.upper()} ", style=STYLES[verdict.status] + " reverse")
    contract = f"contract {verdict.contract.id} {verdict.contract.version}"
    console.print(head, line(f"{contract}, {c.dtype}, {c.tokens:,} sampled tokens"))
    if cause := cause_words(verdict):
        console.print(line(f"cause    {cause}", style=STYLES[verdict.status]))
    for part in _parts(verdict, folder, console, probe):
        console.print(part)


def _parts(
    verdict: Verdict, folder: Path, console: Console, probe: Probe | None
) -> Iterator[Table | Text]:
    """Yields what stands below the head, from top to bottom."""
    c, edge = verdict.comparison, headline(verdict)
    yield from _sides(c)
    yield line()
    if not c.stopped:
        yield from _edge_figures(verdict, console)
        yield from _divergence(verdict)
        for e in c.edges:
            yield from (line(text) for text in routing_lines(e, verdict.contract))
            replay = probe.replay(e.name) if probe else None
            yield from (line(text) for text in (replay_lines(replay, e) if replay else ()))
    if probe is not None and probe.left_out:
        yield line(f"graft passes left out: {probe.left_out}", style="yellow")
    for probed in probe.edges if probe else ():
        yield from probe_lines(verdict, probed)
    yield from _problems(verdict)
    if verdict.status == "pass":
        yield from _rests_on(verdict)
    yield line()
    yield line(f"run      {folder}", style="dim")
    step = next_step(verdict, folder)
    yield line(f"next     {step}")
    differs = not c.stopped and edge is not None and edge.first_bitwise is not None
    if probe is None and differs and "rlk-align probe" not in step:
        where = shlex.quote(str(folder))
        yield line(
            f"         rlk-align probe {where}    which operator introduced what, and its effect"
        )


def _sides(c: Comparison) -> Iterator[Text]:
    yield line(f"model    {c.model}")
    for role, e in c.engines.items():
        spec = engine_spec(e)
        torch = e.environment.get("torch", "")
        yield line(f"{role:<9}{spec}  {e.version}, {e.dtype}, torch {torch}")
    yield line(f"precheck {', '.join(f'{k} {parity(c, k)}' for k in PARITY_KINDS)}")
    if c.controls is not None:
        noise = ", ".join(f"{side} {noise_words(n)}" for side, n in c.controls.noise.items())
        yield line(f"controls observer {c.controls.observer}; {noise}")
        paired, expected = coverage(c)
        yield line(f"coverage {paired:,} of {expected:,} rows paired")
        if c.production is None:
            yield line("         production mode not measured (--production)", style="dim")
        else:
            yield line(
                f"         production against observed: max |Δ| {c.production.max_abs_dlogp:.2g}, "
                f"mean |Δ| {c.production.mean_abs_dlogp:.2g}"
            )
            for name, found in c.production_passes.items():
                yield line(f"           {name}: {production_words(found)}", style="dim")


def _edge_figures(verdict: Verdict, console: Console) -> Iterator[Table | Text]:
    """A row for each edge, and for healthy models; where that does not fit, a line for each figure:
    none is ever cut. Then the law of noise."""
    yield from _raw_figures(verdict, console)
    edge = headline(verdict)
    if edge is not None and (law := noise_law(verdict, edge)):
        yield line(f"{edge.name}: {law}")


def _raw_figures(verdict: Verdict, console: Console) -> Iterator[Table | Text]:
    # 80 columns, so that a CI log does not break it.
    table = columns(["edge"], EDGE_FIGURES)
    rows: dict[str, list[str]] = {e.name: edge_figures(e.metrics) for e in verdict.comparison.edges}
    if rows and (healthy := healthy_figures(verdict)):
        rows["healthy models"] = healthy
    for edge, row in rows.items():
        table.add_row(line(edge), *row)
    unbounded = console.options.update(max_width=1000)
    if Measurement.get(console, unbounded, table).maximum <= console.width:
        yield table
        return
    for edge, row in rows.items():
        yield line(edge)
        for name, value in zip(EDGE_FIGURES, row, strict=True):
            yield line(f"  {name:<9}{value}")


def _divergence(verdict: Verdict) -> Iterator[Text]:
    edge = headline(verdict)
    if edge is None:
        return
    yield line()
    first, over = edge.first_bitwise, over_budget(verdict, edge)
    if over:
        yield from _fitting(f"{edge.name}: ", parting_words(verdict, edge, over).split("; "), "; ")
        yield line(f"over budget ({edge.name})", style="bold")
        for operator in over[:_SHOWN]:
            yield from _over_budget(operator, edge, verdict)
        yield from _rest(len(over))
    elif verdict.comparison.referee:
        yield _within_budgets(verdict, edge)
    if first is None and over:
        return
    if first is None:
        equal = sum(not s.differ for s in edge.sites)
        yield line(
            f"first divergence ({edge.name}): none; {equal} of {len(edge.sites)} sites equal"
        )
        return
    yield from _introducer(edge, first)
    legitimate = why_legitimate(verdict, edge, first.site)
    if legitimate:
        yield line(f"  {legitimate}")
    others = [s.site for s in edge.sites if s.introduced and s.site != first.site]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        yield line(f"  later units that add to it: {', '.join(others[:_SHOWN])}{more}", style="dim")
    if edge.name == "decode_vs_prefill":
        yield line("  decode differs from prefill in the rollout engine itself")


def _over_budget(over: OverBudget, edge: EdgeResult, verdict: Verdict) -> Iterator[Text]:
    unit = over.unit
    off, *unchecked = whose_off(over).split("; ")
    yield line("  ") + line(unit.site, "bold") + line(f"  {off}")
    yield from (line(f"    {text}") for text in unchecked)
    yield line(f"    at sample {unit.sample}, position {unit.position}")
    for u, (where, how) in zip(over.units, how_words(verdict, over), strict=True):
        yield from _fitting(f"    {where}: ", how.split("; "), "; ")
        if u.fused_with:
            yield line(f"    computed together with {u.fused_with}: either may be the cause")
    yield from _code(unit.site, edge, verdict)
    if not over.units:
        site = next(s for s in edge.sites if s.site == unit.site)
        yield line(f"    {site_figures(site)}")


def _code(site: str, edge: EdgeResult, verdict: Verdict) -> Iterator[Text]:
    """Yields the operator's place on both sides, and settings that only one side has."""
    for side, place, unlike in code_places(verdict, edge, site):
        yield line(f"    {side:<8} {place}", style="dim")
        if unlike:
            yield line(f"             {', '.join(unlike[:_SHOWN])}", style="dim")


def _fitting(start: str, parts: list[str], between: str) -> Iterator[Text]:
    """One line, or where that is too long for a log one for each part."""
    whole = start + between.join(parts)
    if len(whole) <= _WIDTH:
        yield line(whole)
        return
    yield line(start + parts[0])
    yield from (line(f"      {part}") for part in parts[1:])


def _within_budgets(verdict: Verdict, edge: EdgeResult) -> Text:
    units = [u for u in verdict.comparison.referee if edge.name in u.edges]
    done = sum(u.errors is not None for u in units)
    if not verdict.contract.budgets:
        return line(f"{done} of {len(units)} operators recomputed in float64; no budgets for them")
    text = "no operator beyond its budget on either side"
    return line(f"{text}: {done} of {len(units)} recomputed in float64")


def _introducer(edge: EdgeResult, unit: Introducer) -> Iterator[Text]:
    where = line(f"  at sample {unit.sample}, position {unit.position}")
    yield line(f"first divergence ({edge.name}): ") + line(unit.site, "bold") + where
    site = next(s for s in edge.sites if s.site == unit.site)
    if site.introduced:
        equal = f"; equal up to {unit.last_equal}" if unit.last_equal else ""
        yield line(f"  its inputs are bit-equal, its outputs are not{equal}")
    if ranks := rank_words(unit):
        yield line(f"  {ranks}")
    yield line(f"  {site_figures(site)}")


def _problems(verdict: Verdict) -> Iterator[Text]:
    c = verdict.comparison
    yield from _section(
        "mismatches before anything was computed",
        "bold",
        [
            [
                line(f"  {mismatch_words(m)}"),
                *([line(f"    {m.detail}", "dim")] if m.detail else []),
            ]
            for m in c.mismatches
        ],
    )
    breaches = ((b, _over(b)) for b in verdict.breaches)
    yield from _section("breaches", "bold red", [_check(*b) for b in breaches])
    warnings = ((w, f"{w.value:.4g} > {w.warn:g}, {w.fail:g} allowed") for w in verdict.warnings)
    yield from _section("near a limit", "bold yellow", [_check(*w) for w in warnings])
    if verdict.waivers:
        yield line()
        yield line("waivers", style="bold")
        for use in verdict.waivers:
            yield line(f"  {use}", style="red" if use.state == "expired" else "")
    doubts = [[line(f"  {doubt}")] for doubt in verdict.doubts]
    yield from _section("nothing can be concluded", "bold yellow", doubts)
    for note in verdict.notes:
        yield line(f"note: {note}", style="dim")
    sites: dict[str, dict[str, None]] = {}
    for edge in c.edges:
        for site, reason, explained in edge.unpaired:
            if explained:
                sites.setdefault(reason, {})[site] = None
    for reason, named in list(sites.items())[:_SHOWN]:
        first = list(named)[:_SHOWN]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        yield line(f"  unpaired {', '.join(first)}{more}: {reason}", style="dim")
    yield from _rest(len(sites))


def _section(heading: str, style: str, entries: Sequence[Iterable[Text]]) -> Iterator[Text]:
    """A heading and its first entries; nothing where there is none."""
    if entries:
        yield line()
        yield line(heading, style=style)
        for lines in entries[:_SHOWN]:
            yield from lines
        yield from _rest(len(entries))


def _over(breach: LimitCheck) -> str:
    """E.g. `0.12 > 0.09`, and where there is an interval its low end."""
    at_least = "" if breach.low is None else f", at least {breach.low:.4g}"
    return f"{breach.value:.4g}{at_least} > {breach.fail:.4g}"


def _check(check: LimitCheck, figure: str) -> Iterator[Text]:
    where = " ".join(filter(None, [check.edge, check.side, check.site]))
    return _fitting(f"  {where}: ", [f"{check.metric} {figure}", f"({check.limit})"], "  ")


def _rest(count: int) -> Iterator[Text]:
    if count > _SHOWN:
        yield line(f"  and {count - _SHOWN} more")


def _rests_on(verdict: Verdict) -> Iterator[Text]:
    """Yields what a pass rests on: how much is equal, and what is closest to its limit."""
    edges = [e for e in verdict.comparison.edges if e.name in verdict.comparison.judged]
    differ = sum(s.differ for e in edges for s in e.sites)
    rows = sum(s.rows for e in edges for s in e.sites)
    yield line()
    if tested := positions_words(verdict.comparison):
        yield line(f"{tested}: {LONGER_PROMPTS}")
    if not differ:
        yield line(f"all {rows:,} rows are bit-equal")
        return
    places = {s.site for e in edges for s in e.sites if s.differ}
    yield line(
        f"{differ:,} of {rows:,} rows differ, at {len(places)} sites: within the limits of "
        f"{verdict.contract.id}, not equal"
    )
    closest = closest_limit(verdict)
    if closest is not None:
        where = " ".join(filter(None, [closest.edge, closest.site]))
        used = f"{closest.value:.2g} of {closest.fail:g}"
        yield line(f"  closest to its limit: {where} {closest.metric}, {used}", style="dim")
