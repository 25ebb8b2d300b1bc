"""A comparison module by module, as a document."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from rlk_align.judge.budgets import bounds_of, budget_of
from rlk_align.judge.wording import how_off
from rlk_align.modules.record import ModulesReport, ModulesVerdict
from rlk_align.report.document import DataTable, Document, Fact, Section, Tone
from rlk_align.report.words import bounded, engine_spec
from rlk_align.results import RefereedUnit, SideName

_SHOWN = 4
"""The most names in one line; the rest is counted."""
NEVER_PASSES = "what is inside unknown modules, between modules and in decode is not judged"


def modules_document(verdict: ModulesVerdict, folder: str, command: Sequence[str] = ()) -> Document:
    """Returns the weights that differ, the modules over budget, and what could not be judged."""
    headline, text = _outcome(verdict)
    return Document(
        status=verdict.status,
        headline=headline,
        text=text,
        folder=folder,
        facts=list(_facts(verdict)),
        sections=[
            *_changed(verdict.report),
            *_over(verdict),
            *_unfound(verdict.report),
            *_unjudged(verdict.report),
        ],
        next_steps=[_next(verdict)],
        command=shlex.join(command),
    )


def _outcome(verdict: ModulesVerdict) -> tuple[str, str]:
    changed, over = verdict.report.changed, verdict.over
    named = [f"{c.side} {c.tensor}" for c in changed]
    parts = [f"Weights that differ from the checkpoint: {len(changed)}"] if changed else []
    parts += [f"{'m' if parts else 'M'}odules over budget: {len(over)}"] if over else []
    if not parts:
        return "Nothing is over budget, and nothing is concluded.", f"{_cap(NEVER_PASSES)}."
    named += [f"{u.side} {u.site}" for u in over]
    first = f"First: {named[0]}."
    return f"{'; '.join(parts)}.", f"{first} {_cap(NEVER_PASSES)}."


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _facts(verdict: ModulesVerdict) -> Iterator[Fact]:
    r, contract = verdict.report, verdict.contract
    yield Fact("contract", f"{contract.id} {contract.version}, the budgets of operators alone")
    yield Fact("model", r.model)
    for side, e in r.engines.items():
        torch = e.environment.get("torch", "not recorded")
        yield Fact(side, f"{engine_spec(e)}  {e.version}, {e.dtype}, torch {torch}")
    found = (f"{side} {w.found} of {r.tensors}" for side, w in r.weights.items())
    yield Fact("weights", f"{', '.join(found)} tensors of the checkpoint found in the engine")
    judged = (f"{side} {_judged(r, side)} of {_modules(r, side)}" for side in r.engines)
    yield Fact("modules", f"{', '.join(judged)} recomputed in float64")
    detail = "".join(f"; {text}" for text in r.controls.observer_detail)
    tone: Tone = "" if r.controls.observer == "bitwise" else "doubt"
    yield Fact("controls", f"observer {r.controls.observer}{detail}", tone)
    d = r.drift
    figures = f"mean |Δ| {d.mean_abs_dlogp:.2g}, max |Δ| {d.max_abs_dlogp:.2g}"
    yield Fact("drift", f"{figures} of {d.tokens:,} tokens of the prompts: shown, not judged")


def _judged(r: ModulesReport, side: SideName) -> int:
    return sum(u.side == side for u in r.units)


def _modules(r: ModulesReport, side: SideName) -> int:
    return _judged(r, side) + sum(u.side == side for u in r.unjudged)


def _changed(r: ModulesReport) -> list[Section]:
    if not r.changed:
        return []
    table = DataTable(
        name="changed",
        caption="weights that differ from the checkpoint",
        columns=("tensor", "side", "parameter of the engine", "rows that differ"),
        rows=[[c.tensor, c.side, c.live, f"{c.changed:,} of {c.rows:,}"] for c in r.changed],
        names=3,
    )
    return [Section(heading="weights that differ from the checkpoint", table=table, tone="breach")]


def _over(verdict: ModulesVerdict) -> list[Section]:
    if not verdict.over:
        return []
    table = DataTable(
        name="over",
        caption="modules over budget, errors in roundings",
        columns=("module", "side", "budget", "rms", "allowed"),
        rows=[[u.site, u.side, *_figures(verdict, u)] for u in verdict.over],
        names=3,
    )
    items = []
    for u in verdict.over:
        where = f"; {u.code}" if u.code else ""
        items.append(f"{u.side} {u.site}: {how_off(u, verdict.contract)}{where}")
    return [Section(heading="over budget", table=table, items=items, tone="breach")]


def _figures(verdict: ModulesVerdict, unit: RefereedUnit) -> list[str]:
    budget, bounds = budget_of(verdict.contract, unit), bounds_of(verdict.contract, unit)
    assert budget is not None
    assert bounds is not None
    assert unit.errors is not None
    return [budget.id, f"{unit.errors.rms:.3g}", f"{bounds['rms']:.3g}"]


def _unfound(r: ModulesReport) -> list[Section]:
    sets = {side: set(w.missing) for side, w in r.weights.items()}
    neither = sorted(set.intersection(*sets.values()))
    items = [_named("on neither side", neither)] if neither else []
    for side, missing in sets.items():
        alone = sorted(missing - set(neither))
        items += [_named(f"not on the {side} side", alone)] if alone else []
    for side, w in r.weights.items():
        items += [_named(f"only in the {side} engine", w.strays)] if w.strays else []
    return [Section(heading="weights that were not paired", items=items)] if items else []


def _named(what: str, names: Sequence[str]) -> str:
    return f"{what}: {', '.join(bounded(names, _SHOWN))}"


def _unjudged(r: ModulesReport) -> list[Section]:
    counts = Counter((u.side, u.reason) for u in r.unjudged)
    if not counts:
        return []
    first = {(u.side, u.reason): u.module for u in reversed(r.unjudged)}
    table = DataTable(
        name="unjudged",
        caption="modules that were not judged",
        columns=("first module", "side", "reason", "modules"),
        rows=[[first[at], at[0], at[1], str(count)] for at, count in counts.items()],
        names=3,
    )
    return [Section(heading="not judged", table=table)]


def _next(verdict: ModulesVerdict) -> str:
    if verdict.report.changed:
        return "check how the engine loads these tensors, and what changed them afterwards"
    if verdict.over:
        return "read the code of these modules, and the settings that they were made with"
    if verdict.report.described:
        return "for a verdict that can pass, compare without --modules: this family is described"
    return "for a verdict that can pass, describe the family: docs/add-a-family.md"
