"""The verdict card: what is wrong, on which side, and what to do next."""

from dataclasses import dataclass

from rlk_align.report.document import Document

SIGNS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The contents of the card at the top of a page."""

    status: str
    sign: str
    what: str
    more: str
    answers: list[tuple[str, str]]
    """(question, answer), the most important first."""
    facts: list[tuple[str, str]]
    command: str
    """The command line that gave it; empty where that is not recorded."""


def document_card(document: Document) -> Card:
    """The card of a document."""
    return Card(
        status=document.status,
        sign=SIGNS[document.status],
        what=document.headline,
        more=document.text,
        answers=[("do next", step) for step in document.next_steps],
        facts=[(fact.label, fact.text) for fact in document.facts],
        command=document.command,
    )
