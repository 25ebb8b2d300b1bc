"""An imported run as a page: its diagnoses, and its metrics over the steps."""

from dataclasses import dataclass
from pathlib import Path

from rlk_align.logs.diagnose.explain import Explanation
from rlk_align.logs.diagnose.record import Diagnosis
from rlk_align.logs.monitor.history import History
from rlk_align.report.explained_words import (
    BLIND,
    breach_words,
    interval,
    next_command,
    scope,
    sentence,
    value_words,
)
from rlk_align.report.html.card import SIGNS, Card
from rlk_align.report.html.page import render
from rlk_align.report.html.steps import COLUMNS, run_steps

TOKEN_COLUMNS = ("sequence", "position", "token id", "rollout", "trainer", "Δ")
"""Columns of the table of tokens that show a diagnosis."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisView:
    """What a page shows of a diagnosis."""

    name: str
    title: str
    why: str
    statistic: str
    """What it is, its value with its interval, and the contract's limit."""
    todo: str
    tokens: list[list[str]]
    """A row for each token, with the columns of TOKEN_COLUMNS."""


def explained_page(explained: Explanation, folder: str, history: History | None = None) -> str:
    """Returns the page of an imported run; with `history`, also its metrics over the steps."""
    return render(
        "explained.html",
        name=Path(folder).name or folder,
        where=folder,
        card=_card(explained, folder),
        problems=_problems(explained),
        diagnoses=diagnosis_views(explained, folder),
        token_columns=TOKEN_COLUMNS,
        steps=run_steps(0, folder, history) if history and history.records else None,
        columns=COLUMNS,
        unknown=unknown_groups(explained),
    )


def _card(explained: Explanation, folder: str) -> Card:
    first = explained.diagnoses[0] if explained.diagnoses else None
    answers = []
    if first is not None:
        answers.append(("diagnosis", f"{first.name}, confidence {first.confidence}"))
        answers.append(("do next", next_command(first.next, folder)))
    return Card(
        status=explained.status,
        sign=SIGNS[explained.status],
        what=sentence(explained),
        answers=answers,
        facts=explained_facts(explained),
        command=None,
    )


def explained_facts(explained: Explanation) -> list[tuple[str, str]]:
    """Returns what a card says of a dump: (name, words)."""
    contract = f"{explained.contract.id} {explained.contract.version}, {explained.dtype}"
    return [
        ("contract", contract),
        ("looked at", scope(explained)),
        ("E[ρ]", f"{interval(explained.mean_ratio)}; 1 where the distributions agree"),
        ("c", f"{interval(explained.c)}; mean |Δ| per 1 − p"),
    ]


def _problems(explained: Explanation) -> list[tuple[str, list[str]]]:
    groups = [
        ("Limits that are breached", [breach_words(b) for b in explained.breaches]),
        ("Why nothing can be concluded", list(explained.doubts)),
    ]
    return [(heading, items) for heading, items in groups if items]


def diagnosis_views(explained: Explanation, folder: str) -> list[DiagnosisView]:
    """Returns the diagnoses, the verdict's first."""
    return [_view(d, folder, place > 0) for place, d in enumerate(explained.diagnoses)]


def _view(diagnosis: Diagnosis, folder: str, further: bool) -> DiagnosisView:
    also = "Also: " if further else ""
    return DiagnosisView(
        name=diagnosis.name,
        title=f"{also}{diagnosis.name}, confidence {diagnosis.confidence}",
        why=diagnosis.why,
        statistic=value_words(diagnosis),
        todo=next_command(diagnosis.next, folder),
        tokens=[
            [
                *(t.id, str(t.position), str(t.token)),
                *(_number(value) for value in (t.rollout, t.train)),
                _number(None if t.rollout is None or t.train is None else t.train - t.rollout),
            ]
            for t in diagnosis.samples
        ],
    )


def unknown_groups(explained: Explanation) -> list[tuple[str, list[str]]]:
    """Returns what could not be tested, and what a dump never says, as (heading, sentences)."""
    untested = [f"{x.name}: {x.why}" for x in explained.untested]
    groups = [("Could not be tested", untested), ("A dump cannot tell", list(BLIND))]
    return [(heading, items) for heading, items in groups if items]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
