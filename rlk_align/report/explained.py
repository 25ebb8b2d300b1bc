"""What was explained of a run, as a document."""

from collections.abc import Iterator

from rlk_align.logs.diagnose.explain import Explanation
from rlk_align.logs.diagnose.record import Diagnosis, Token
from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.report.explained_words import (
    BLIND,
    breach_words,
    interval,
    next_command,
    scope,
    sentence,
    value_words,
)


def explained_document(explained: Explanation, folder: str) -> Document:
    """The verdict on an imported run."""
    first = explained.diagnoses[0].next if explained.diagnoses else ""
    return Document(
        status=explained.status,
        headline=sentence(explained),
        folder=folder,
        facts=[
            *measured(explained),
            *(Fact("doubt", doubt, "doubt") for doubt in explained.doubts),
            *(Fact("breach", breach_words(b), "breach") for b in _alone(explained)),
        ],
        sections=[*diagnosis_sections(explained, folder), unknown(explained)],
        next_steps=[next_command(first, folder)] if first else [],
    )


def _alone(explained: Explanation) -> list[tuple[str, str, float, float]]:
    """The limits that are breached, beside those of diagnoses."""
    return [breach for breach in explained.breaches if breach[0] == "numerics"]


def measured(explained: Explanation) -> list[Fact]:
    """The contract, and the figures that every verdict on a dump has."""
    contract = explained.contract
    return [
        Fact("contract", f"{contract.id} {contract.version}, {explained.dtype}"),
        Fact("judged", scope(explained)),
        Fact("E[ρ]", f"{interval(explained.mean_ratio)}; 1 where the distributions agree"),
        Fact("c", f"{interval(explained.c)}; mean |Δ| per 1 − p"),
    ]


def diagnosis_sections(explained: Explanation, folder: str) -> Iterator[Section]:
    """A section for each diagnosis, the verdict's first."""
    for place, diagnosis in enumerate(explained.diagnoses):
        kind = "also" if place else "verdict"
        further = [Fact("next", next_command(diagnosis.next, folder))] if place else []
        yield Section(
            heading=f"{kind}: {diagnosis.name}, confidence {diagnosis.confidence}",
            text=[diagnosis.why, value_words(diagnosis)],
            table=_tokens(diagnosis) if diagnosis.samples else None,
            facts=further,
        )


def unknown(explained: Explanation) -> Section:
    """What could not be tested, and what no dump says."""
    untested = [f"{x.name} could not be tested: {x.why}" for x in explained.untested]
    blind = f"a dump cannot tell: {'; '.join(BLIND)}"
    return Section(heading="not known", items=[*untested, blind], tone="soft")


def _tokens(diagnosis: Diagnosis) -> DataTable:
    return DataTable(
        name=diagnosis.name,
        caption=f"Tokens that show {diagnosis.name} most",
        columns=("sequence", "position", "token id", "rollout", "trainer", "Δ"),
        rows=[_cells(token) for token in diagnosis.samples],
    )


def _cells(t: Token) -> list[str]:
    shift = None if t.rollout is None or t.train is None else t.train - t.rollout
    return [t.id, str(t.position), str(t.token), *map(_value, (t.rollout, t.train, shift))]


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
