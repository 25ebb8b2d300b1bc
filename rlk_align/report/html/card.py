"""The verdict card: what is wrong, on which side, and what to do next."""

import math
import shlex
from dataclasses import dataclass

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.verdict import PARITY_KINDS, closest_limit, coverage, parity
from rlk_align.report.source import ReportSource
from rlk_align.report.words import (
    LONGER_PROMPTS,
    check_words,
    finding,
    next_step,
    noise_words,
    positions_words,
    production_words,
    side_off,
)

SIGNS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The contents of the card at the top of a page."""

    status: str
    sign: str
    what: str
    answers: list[tuple[str, str]]
    """(question, answer), the most important first."""
    facts: list[tuple[str, str]]
    command: str | None
    """The command line that gave it; None where that is not recorded."""


def card(source: ReportSource) -> Card:
    """Builds the verdict card of a run."""
    verdict = source.verdict
    beyond = verdict.breaches or verdict.waived
    worst = max(beyond, key=_badness, default=closest_limit(verdict))
    return Card(
        status=verdict.status,
        sign=SIGNS[verdict.status],
        what=finding(verdict),
        answers=[
            ("which side", side_off(verdict)),
            ("do next", next_step(verdict, source.folder)),
            ("worst limit", _used(worst) if worst else "no limit was applied to a value"),
        ],
        facts=list(_facts(source)),
        command=shlex.join(source.record.command),
    )


def _used(check: LimitCheck) -> str:
    share = f"; {check.excess:.0%} used" if math.isfinite(check.excess) else ""
    return f"{check_words(check)}{share}"


def _badness(check: LimitCheck) -> tuple[bool, bool, float]:
    """A NaN is worst. What is a multiple of its limit says more than what should be 0."""
    return math.isnan(check.value), check.fail > 0, check.excess


def _facts(source: ReportSource) -> list[tuple[str, str]]:
    verdict, c = source.verdict, source.verdict.comparison
    contract = f"{verdict.contract.id} {verdict.contract.version}"
    tested = positions_words(c)
    facts = [
        ("contract", f"{contract}, sha256 {verdict.contract.sha256[:12]}"),
        ("measured", f"{c.tokens:,} sampled tokens, {c.dtype}"),
        *([("tested", f"{tested}; {LONGER_PROMPTS}")] if tested else []),
        ("precheck", ", ".join(f"{kind} {parity(c, kind)}" for kind in PARITY_KINDS)),
    ]
    if c.controls is None:
        return [*facts, ("coverage", "nothing was compared")]
    paired, expected = coverage(c)
    share = f" ({paired / expected:.1%})" if expected else ""
    noise = "; ".join(f"{side} {noise_words(n)}" for side, n in c.controls.noise.items())
    detail = f": {'; '.join(c.controls.observer_detail)}" if c.controls.observer_detail else ""
    production = "not measured"
    if c.production is not None:
        p = c.production
        production = f"max |Δ| {p.max_abs_dlogp:.2g}, mean |Δ| {p.mean_abs_dlogp:.2g} from observed"
        passes = (f"; {name}: {production_words(f)}" for name, f in c.production_passes.items())
        production += "".join(passes)
    return [
        *facts,
        ("coverage", f"{paired:,} of {expected:,} rows paired{share}"),
        ("noise floor", noise),
        ("observer", f"{c.controls.observer}{detail}"),
        ("production mode", production),
    ]
