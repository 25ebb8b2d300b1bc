"""The verdict for a pull request: what is wrong, on which side, what to do next; then the figures.

Below 64 KB whatever the run, for a forge takes no longer comment: lists are cut and their rest is
counted, and parts that do not fit are left out by name.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence

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
from rlk_align.report.markup import block, code, prose, table
from rlk_align.report.probe_units import summary
from rlk_align.report.source import ReportSource
from rlk_align.report.words import (
    EDGE_FIGURES,
    LONGER_PROMPTS,
    bounded,
    check_words,
    code_places,
    edge_figures,
    engine_spec,
    finding,
    healthy_figures,
    how_words,
    mismatch_words,
    next_step,
    noise_law,
    noise_words,
    positions_words,
    side_off,
    whose_off,
)
from rlk_align.results import EdgeResult
from rlk_align.text import printable

LARGEST = 64_000
"""Bytes of a comment."""
_SHOWN = 10
"""Entries of a list that are shown; the rest is counted."""
_LONGEST_COMMAND = 2000
Section = tuple[str, str]
"""(heading, Markdown below it)."""


def markdown(source: ReportSource) -> str:
    """The comment on a pull request."""
    text = _head(source)
    omitted = []
    for heading, body in _sections(source):
        section = f"\n### {heading}\n\n{body}\n"
        # Room for the names of what is left out.
        if len((text + section).encode()) <= LARGEST - 1000:
            text += section
        else:
            omitted.append(heading)
    if omitted:
        text += f"\nLeft out because they are too long: {', '.join(omitted)}.\n"
    return text


def _head(source: ReportSource) -> str:
    verdict, c = source.verdict, source.verdict.comparison
    contract = f"contract {code(verdict.contract.id)} {verdict.contract.version}"
    lines = [
        f"## rlk-align: {verdict.status.upper()}",
        "",
        f"**{prose(finding(verdict))}**",
        "",
        f"- **Side:** {prose(side_off(verdict))}",
        f"- **Next:** {_next(source)}",
        f"- **Judged:** {c.tokens:,} sampled tokens in {c.dtype}, by {contract}",
    ]
    if c.controls is not None:
        paired, expected = coverage(c)
        noise = "; ".join(f"{side} {noise_words(n)}" for side, n in c.controls.noise.items())
        lines.append(f"- **Rests on:** {paired:,} of {expected:,} rows paired; {prose(noise)}")
    closest = closest_limit(verdict)
    tested = positions_words(c)
    if verdict.status == "pass" and tested:
        lines.append(f"- **Tested:** {tested}; {prose(LONGER_PROMPTS)}")
    if verdict.status == "pass" and closest is not None:
        lines.append(f"- **Closest to its limit:** {prose(check_words(closest))}")
    return "\n".join(lines) + "\n"


def _next(source: ReportSource) -> str:
    step = next_step(source.verdict, source.place)
    words, colon, command = step.partition(": rlk-align ")
    return f"{prose(words)}: {code(f'rlk-align {command}')}" if colon else prose(step)


def _sections(source: ReportSource) -> Iterator[Section]:
    """Yields the sections that have content, in the order of a reader's questions."""
    verdict, c = source.verdict, source.verdict.comparison
    if not c.stopped and c.edges:
        rows = [[code(e.name), *edge_figures(e.metrics)] for e in c.edges]
        if healthy := healthy_figures(verdict):
            rows.append(["healthy models", *healthy])
        edges = table(["edge", *EDGE_FIGURES], rows)
        shown = headline(verdict)
        law = noise_law(verdict, shown) if shown else ""
        yield "Edges", f"{edges}\n{code(shown.name)}: {prose(law)}\n" if shown and law else edges
    if edge := headline(verdict):
        over = over_budget(verdict, edge)
        if over and not c.stopped:
            yield (
                f"Operators beyond their budgets ({edge.name})",
                _bullets([_operator(verdict, edge, o) for o in over]),
            )
    mismatches = (f"{mismatch_words(m)}{f'; {m.detail}' if m.detail else ''}" for m in c.mismatches)
    lists: dict[str, Iterable[object]] = {
        "Nothing can be concluded": verdict.doubts,
        "Mismatches before anything was computed": mismatches,
        "Limits that are breached": map(check_words, verdict.breaches),
        "Near a limit": map(check_words, verdict.warnings),
        "Waivers": (f"{use.state}: {use}" for use in verdict.waivers),
        "Probe": _probed(source),
        "Notes": verdict.notes,
    }
    for heading, items in lists.items():
        if body := _bullets(list(map(prose, items))):
            yield heading, body
    yield "The two sides", _sides(verdict)
    command = printable(shlex.join(source.record.command))
    if len(command) > _LONGEST_COMMAND:
        command = "the command in the run's run.json, which is too long to be shown"
    yield "To make the run again", block(command)


def _bullets(items: Sequence[str]) -> str:
    """A list of bounded length; empty without an entry."""
    return "\n".join(f"- {item}" for item in bounded(items, _SHOWN))


def _operator(verdict: Verdict, edge: EdgeResult, over: OverBudget) -> str:
    """Which side is off, how, and where the operator is in the code."""
    unit = over.unit
    lines = [
        f"**{code(unit.site)}**: {whose_off(over)} (sample {unit.sample}, position {unit.position})"
    ]
    for u, (where, how) in zip(over.units, how_words(verdict, over), strict=True):
        fused = f"; computed together with {u.fused_with}" if u.fused_with else ""
        lines.append(f"  - {prose(where)}: {prose(how + fused)}")
    for side, place, unlike in code_places(verdict, edge, unit.site):
        settings = f", with {', '.join(map(code, unlike[:_SHOWN]))}" if unlike else ""
        lines.append(f"  - {side} code: {code(place)}{settings}")
    return "\n".join(lines)


def _probed(source: ReportSource) -> Iterator[str]:
    if source.probe is not None:
        if source.probe.left_out:
            yield f"graft passes were left out: {source.probe.left_out}"
        for probed in source.probe.edges:
            yield f"{probed.name}: {summary(source.verdict, probed)}"


def _sides(verdict: Verdict) -> str:
    c = verdict.comparison
    rows = [
        [
            *map(
                code,
                (side, engine_spec(e), e.version, e.dtype, e.environment.get("torch", "not told")),
            )
        ]
        for side, e in c.engines.items()
    ]
    precheck = ", ".join(f"{kind} {parity(c, kind)}" for kind in PARITY_KINDS)
    model = f"Model {code(c.model)}. Precheck: {precheck}."
    return f"{table(['side', 'engine', 'version', 'dtype', 'torch'], rows, names=5)}\n\n{model}"
