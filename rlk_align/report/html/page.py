"""The page of one run, and the rendering of all templates."""

import base64
import hashlib
import math
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlk_align.judge.verdict import Verdict, headline
from rlk_align.report.distributions import distribution_sections
from rlk_align.report.drift import drift_series
from rlk_align.report.html.drift import drift_figure
from rlk_align.report.html.logprobs import histogram, largest_bound, metric_rows, noise_floor
from rlk_align.report.html.operator_answers import answers
from rlk_align.report.html.operator_heat import operator_heat
from rlk_align.report.html.operator_table import operator_table
from rlk_align.report.html.provenance import engine_facts, side_by_side
from rlk_align.report.html.ranks import rank_map
from rlk_align.report.html.routing import REPLAY_COLUMNS, routing_panel
from rlk_align.report.html.samples import deltas, worst_samples
from rlk_align.report.html.tokens import delta_ramp, error_ramp, sample_view
from rlk_align.report.operator_facts import operator_facts
from rlk_align.report.probe_units import summary
from rlk_align.report.source import ReportSource
from rlk_align.report.verdict import problem_sections, source_document
from rlk_align.results import EdgeResult
from rlk_align.text import printable
from rlk_align.version import __version__

_TEMPLATES = "templates"
STATUS_SIGNS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}
NO_ROWS = "This run keeps no rows (comparison.parquet), so single tokens cannot be shown."


def render(template: str, **context: object) -> str:
    """Renders a page from its template; text that is not Markup is made printable and escaped."""
    css, js = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    shared = {
        "css": css,
        "js": js,
        "policy": policy,
        "version": __version__,
        "number": _number,
        "status_signs": STATUS_SIGNS,
    }
    return _environment().get_template(template).render(shared | context)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("rlk_align.report.html", _TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _asset(name: str) -> Markup:
    text = (files("rlk_align.report.html") / _TEMPLATES / name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its element"
    return Markup(text)


def _hash(text: str) -> str:
    """Returns the hash by which a content security policy allows an inline part."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _number(cell: str) -> Markup:
    """Returns the attributes by which a numeric cell is aligned and sorted."""
    try:
        value = float(cell.replace(",", "").removesuffix("%"))
    except ValueError:
        return Markup("")
    size = repr(value) if math.isfinite(value) else "1e999"
    return Markup(' class="num" data-v="{}"').format(size)


def run_page(source: ReportSource) -> str:
    """Returns the page of one run."""
    verdict, edge = source.verdict, headline(source.verdict)
    context: dict[str, object] = {
        "document": source_document(source),
        "name": source.name,
        "where": str(source.folder),
        "problems": list(problem_sections(verdict)),
        "provenance": side_by_side(list(map(engine_facts, verdict.comparison.engines.values()))),
        "sides": list(verdict.comparison.engines),
        "unpaired": _unpaired(verdict),
        "waivers": _waivers(verdict),
        "notes": verdict.notes,
        "ranks": rank_map(verdict.comparison),
        "drift": None,
        "routing": None,
    }
    if edge is not None and not verdict.comparison.stopped:
        context |= _charts(source, edge)
    context["sections"] = [(id_, words) for id_, words, needed in _SECTIONS if context[needed]]
    return render("run.html", **context)


_SECTIONS = [
    ("problems", "Breaches, warnings and doubts", "problems"),
    ("provenance", "Provenance", "document"),
    ("drift", "Where drift starts", "drift"),
    ("heatmap", "Layers and operators", "drift"),
    ("routing", "Routing", "routing"),
    ("tokens", "Tokens", "drift"),
    ("logprobs", "Log-probs", "drift"),
    ("rankmap", "Ranks", "ranks"),
    ("operators", "Operators", "drift"),
    ("unpaired", "Unpaired sites", "document"),
    ("waivers", "Waivers", "document"),
    ("notes", "Notes", "notes"),
]
"""Each section's id and heading, and the variable without which the page lacks the section."""


def _unpaired(verdict: Verdict) -> list[list[str]]:
    return [
        [edge.name, site, reason, "yes" if explained else "no"]
        for edge in verdict.comparison.edges
        for site, reason, explained in edge.unpaired
    ]


def _waivers(verdict: Verdict) -> list[list[str]]:
    return [
        [
            *(w.limit, ", ".join(w.sites or ["all"]), ", ".join(w.edges or ["all"])),
            *(w.owner, w.reason, str(w.expires), str(use.days_left), use.state, str(use.breaches)),
        ]
        for use in verdict.waivers
        for w in [use.waiver]
    ]


_SIGNS = {"pass": "≤", "warn": "! >", "waived": "○ >", "fail": "✕ >"}
_OUTCOMES = {"pass": "", "warn": "near-limit", "waived": "near-limit", "fail": "breach"}
"""The sign and the CSS class of each outcome of a limit."""


def _charts(source: ReportSource, edge: EdgeResult) -> dict[str, object]:
    """Returns the template's variables for the charts of the headline edge."""
    verdict, operators = source.verdict, operator_facts(source, edge)
    series = [drift_series(source, edge)]
    columns, rows = operator_table(operators)
    probed = source.probe.edge(edge.name) if source.probe else None
    words = f"probe: {summary(verdict, probed)}" if probed else "Not probed."
    if source.probe and source.probe.left_out:
        words = f"Graft passes were omitted: {source.probe.left_out}"
    return {
        "edge": edge.name,
        "answers": answers(source, edge),
        "edges": [e.name for e in verdict.comparison.edges],
        "metrics": metric_rows(verdict, verdict.comparison.edges),
        "distributions": list(distribution_sections(verdict.comparison)),
        "drift": drift_figure("drift-chart", f"Drift of {edge.name}", series, linked=True),
        "other_drifts": [_other(source, e) for e in verdict.comparison.edges if e is not edge],
        "heat": operator_heat(operators),
        "routing": routing_panel(source, edge),
        "replay_columns": REPLAY_COLUMNS,
        "columns": columns,
        "operators": rows,
        "probe_words": words,
        "signs": _SIGNS,
        "outcomes": _OUTCOMES,
        "no_rows": NO_ROWS,
        **_rows(source, edge),
    }


def _other(source: ReportSource, edge: EdgeResult) -> dict[str, object]:
    """Returns the folded chart of another edge's drift."""
    operators = operator_facts(source, edge)
    differ = sum(bool(o.site.differ) for o in operators)
    title = f"Drift of {edge.name}"
    series = [drift_series(source, edge)]
    return {
        "title": title,
        "summary": f"{differ} of {len(operators)} sites differ"
        if differ
        else "all sites bit-equal",
        "figure": drift_figure(f"drift-{edge.name}", title, series, linked=False),
    }


def _rows(source: ReportSource, edge: EdgeResult) -> dict[str, object]:
    """Returns the template's variables for the charts of tokens."""
    if not source.run.has_rows:
        return {"samples": [], "histogram": None}
    bound = largest_bound(source.verdict, edge)
    stretches = worst_samples(source, edge)
    delta, errors = delta_ramp(stretches), error_ramp(stretches)
    return {
        "samples": [sample_view(s, bound, delta, errors) for s in stretches],
        "samples_words": f"The {len(stretches)} sequences with the largest |Δlogp| of {edge.name}, "
        "in descending order. A long sequence is cut to the stretch around the first sampled "
        "token, or around its worst one if that comes later. "
        "A row's log-prob is that of the next token; here each token has its own.",
        "error_legend": errors.legend(),
        "delta_legend": delta.legend(),
        "bound": bound,
        "histogram": histogram(
            deltas(source, edge), bound, noise_floor(source.verdict.comparison), edge.name
        ),
    }
