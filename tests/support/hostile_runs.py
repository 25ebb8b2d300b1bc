"""Runs whose names, reasons and messages are hostile, and one that is too large for a comment."""

import dataclasses
from datetime import date
from pathlib import Path

import comparisons
from report_runs import hostile_engines, hostile_mismatch, made_comparison
from synthetic import SHAPE, compared_run

from rlk_align.judge.contract import Contract
from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import judge
from rlk_align.model.sites import model_sites
from rlk_align.probe.record import Probe
from rlk_align.report.source import ReportSource
from rlk_align.results import CodePlace, Comparison, RefereedUnit

PAYLOADS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "`tick`|pipe|``two``",
    "\n## heading\r\n::error::forged\n- item",
    "@octocat and @org/team",
    "[click](https://evil.example) www.evil.example javascript:alert(1)",
    "![x](http://evil.example/x.png) <https://evil.example> #12 :smile: $x^2$",
    "]]> &amp; &lt; -->\x00\x08\x1b[31m\ufffe \u202egpj.exe \\| \\` \\",
    "%0A::warning::forged, file=/etc/passwd,line=1::x",
    "1. one  ~~gone~~ **bold** _slanted_ | a | b |",
    "emoji 🦊 and مرحبا",
)
TODAY = date(2030, 1, 15)


def hostile_text() -> str:
    return " ".join(PAYLOADS)


def made_source(folder: Path, comparison: Comparison, contract: Contract) -> ReportSource:
    """The source of a made-up comparison, judged on TODAY."""
    run = compared_run(folder)
    verdict = judge(comparison, contract, TODAY)
    record = run.record.model_copy(update={"command": ["rlk-align", "compare", hostile_text()]})
    return ReportSource(run=run, record=record, verdict=verdict, probe=None)


def hostile_contract() -> Contract:
    """The contract bf16 with waivers whose owners and reasons are hostile."""
    contract = load_contract("bf16", "bfloat16").model_dump(exclude_defaults=True)
    limit = "noise-excess"
    said = hostile_text()
    dates = {"expired": date(2030, 1, 1), "used": date(2030, 1, 20), "later": date(2031, 1, 1)}
    contract["waivers"] = [
        {"limit": limit, "owner": said, "reason": said, "expires": dates[name]}
        for name in ("expired", "used", "later")
    ]
    return Contract.model_validate(contract)


def hostile_source(folder: Path) -> ReportSource:
    """Every text in it is hostile, and the train side is off in one operator."""
    sites = model_sites(SHAPE)
    made = made_comparison(sites, over=[sites[3].name])
    code = CodePlace(
        module=hostile_text(),
        kind=hostile_text(),
        file=hostile_text(),
        line=1,
        settings={hostile_text(): hostile_text()},
    )
    referee = [_with_hostile_words(u, code) for u in made.referee]
    edge = made.edges[0].model_copy(update={"unpaired": [("embed", hostile_text(), True)]})
    comparison = made.model_copy(
        update={
            "model": hostile_text(),
            "engines": hostile_engines(),
            "mismatches": [hostile_mismatch()],
            "allowed": ["weights"],
            "referee": referee,
            "edges": [edge],
        }
    )
    probe = Probe(edges=[], left_out=hostile_text())
    source = made_source(folder, comparison, hostile_contract())
    return dataclasses.replace(source, probe=probe)


def _with_hostile_words(unit: RefereedUnit, code: CodePlace) -> RefereedUnit:
    said = hostile_text()
    return unit.model_copy(update={"code": code, "explanation": said, "fused_with": said})


def doubtful_source(folder: Path) -> ReportSource:
    """An inconclusive run whose reasons are hostile text."""
    edge = comparisons.edge(unpaired=[("embed", hostile_text(), False)])
    comparison = comparisons.comparison(
        edge, mismatches=[hostile_mismatch()], allowed=["weights"], engines=hostile_engines()
    )
    return made_source(folder, comparison, comparisons.contract())


def huge_source(folder: Path) -> ReportSource:
    """A run of 60 layers in which every operator is off, with very long names."""
    sites = model_sites(dataclasses.replace(SHAPE, layers=60))
    made = made_comparison(sites, over=[s.name for s in sites[1:]])
    said = hostile_text() * 20
    code = CodePlace(module=said, kind=said, file=said, line=1, settings={said: said})
    comparison = made.model_copy(
        update={
            "model": said,
            "mismatches": [hostile_mismatch().model_copy(update={"name": said})] * 500,
            "allowed": ["weights"],
            "referee": [_with_hostile_words(u, code) for u in made.referee],
        }
    )
    source = made_source(folder, comparison, hostile_contract())
    record = source.record.model_copy(update={"command": ["rlk-align", said * 100]})
    return dataclasses.replace(source, record=record)
