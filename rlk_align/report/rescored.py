"""A dump that engines scored again, as a document."""

from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.words import WHAT
from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.report.explained import diagnosis_sections, measured, unknown
from rlk_align.report.explained_words import breach_words
from rlk_align.report.explained_words import sentence as explained_sentence
from rlk_align.report.rescored_words import (
    EDGE_COLUMNS,
    breaches,
    chosen,
    edge_rows,
    engine_words,
    next_command,
    temperature,
)


def rescored_document(rescored: Rescored, dump: str, scores: str) -> Document:
    """The verdict on a rescored dump; `dump` and `scores` are the folders of the dump and of the
    scored run."""
    explained = rescored.explained
    alone = [f"the dump alone: {breach_words(b)}" for b in explained.breaches]
    return Document(
        status=rescored.status,
        headline=rescored.sentence,
        folder=scores,
        facts=[
            Fact("dump", f"{explained_sentence(explained)} {dump}"),
            *(Fact(side, engine_words(e)) for side, e in rescored.engines.items()),
            Fact("scored", f"{chosen(rescored)}; {temperature(rescored)}"),
            *(Fact("note", note, "soft") for note in rescored.notes),
            *(Fact("doubt", doubt, "doubt") for doubt in rescored.doubts),
            *(Fact("breach", breach, "breach") for breach in [*breaches(rescored), *alone]),
        ],
        sections=[
            Section(
                heading="the mismatch, edge by edge",
                table=DataTable(
                    name="edges",
                    caption="Δ of a token is the sum of the edges'. Intervals are clustered by "
                    "sequence.",
                    columns=EDGE_COLUMNS,
                    rows=edge_rows(rescored),
                ),
                items=[f"{edge.name}: {WHAT[edge.name]}" for edge in rescored.edges],
            ),
            Section(heading="the dump alone", facts=measured(explained)),
            *diagnosis_sections(explained, dump),
            unknown(explained),
        ],
        next_steps=[next_command(rescored.next, dump, scores)],
    )
