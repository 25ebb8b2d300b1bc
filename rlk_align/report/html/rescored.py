"""A dump that engines scored again, as a page."""

from pathlib import Path

from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.words import WHAT
from rlk_align.report.explained_words import breach_words
from rlk_align.report.explained_words import sentence as explained_sentence
from rlk_align.report.html.card import SIGNS, Card
from rlk_align.report.html.explained import (
    TOKEN_COLUMNS,
    diagnosis_views,
    explained_facts,
    unknown_groups,
)
from rlk_align.report.html.page import render
from rlk_align.report.rescored_words import (
    EDGE_COLUMNS,
    breaches,
    chosen,
    edge_rows,
    engine_words,
    next_command,
    temperature,
)


def rescored_page(rescored: Rescored, dump: str, scores: str) -> str:
    """Returns the page; `dump` and `scores` are the folders of the dump and of the scored run."""
    return render(
        "rescored.html",
        name=Path(dump).name or dump,
        where=scores,
        card=_card(rescored, dump, scores),
        problems=_problems(rescored),
        edge_columns=EDGE_COLUMNS,
        edges=edge_rows(rescored),
        meanings=[(edge.name, WHAT[edge.name]) for edge in rescored.edges],
        diagnoses=diagnosis_views(rescored.explained, dump),
        token_columns=TOKEN_COLUMNS,
        unknown=_notes(rescored),
    )


def _card(rescored: Rescored, dump: str, scores: str) -> Card:
    engines = [(side, engine_words(engine)) for side, engine in rescored.engines.items()]
    return Card(
        status=rescored.status,
        sign=SIGNS[rescored.status],
        what=rescored.sentence,
        answers=[
            ("the dump alone", explained_sentence(rescored.explained)),
            ("do next", next_command(rescored.next, dump, scores)),
        ],
        facts=[
            *engines,
            ("scored again", chosen(rescored)),
            ("at", temperature(rescored)),
            *explained_facts(rescored.explained),
            ("dump", dump),
            ("scores", scores),
        ],
        command=None,
    )


def _problems(rescored: Rescored) -> list[tuple[str, list[str]]]:
    alone = [breach_words(b) for b in rescored.explained.breaches]
    groups = [
        ("Limits that an edge breaches", breaches(rescored)),
        ("Limits that the dump breaches", alone),
        ("Why nothing can be concluded", list(rescored.doubts)),
    ]
    return [(heading, items) for heading, items in groups if items]


def _notes(rescored: Rescored) -> list[tuple[str, list[str]]]:
    notes = [("Of the scoring", list(rescored.notes))] if rescored.notes else []
    return [*notes, *unknown_groups(rescored.explained)]
