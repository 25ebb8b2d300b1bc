"""A dump that engines scored again, for a pull request."""

from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.words import WHAT
from rlk_align.report.explained_markdown import diagnosis_sections, measured
from rlk_align.report.explained_words import scope
from rlk_align.report.explained_words import sentence as explained_sentence
from rlk_align.report.markup import prose, table
from rlk_align.report.rescored_words import (
    EDGE_COLUMNS,
    breaches,
    chosen,
    edge_rows,
    engine_words,
    next_command,
    temperature,
)


def rescored_markdown(rescored: Rescored, dump: str, scores: str) -> str:
    """Renders the verdict on a rescored dump as Markdown; `dump` and `scores` are the folders of
    the dump and of the scored run."""
    explained = rescored.explained
    rows = [[prose(cell) for cell in row] for row in edge_rows(rescored)]
    engines = [f"- {side}: {prose(engine_words(e))}" for side, e in rescored.engines.items()]
    lines = [
        f"## rlk-align: {rescored.status.upper()}",
        f"**{prose(rescored.sentence)}**",
        *(prose(doubt) for doubt in rescored.doubts),
        *(prose(breach) + "." for breach in breaches(rescored)),
        table(list(EDGE_COLUMNS), rows, figures=True),
        "\n".join(f"- {edge.name}: {prose(WHAT[edge.name])}" for edge in rescored.edges),
        f"Next: {prose(next_command(rescored.next, dump, scores))}",
        "\n".join(engines),
        f"Scored again: {prose(chosen(rescored))}; {prose(temperature(rescored))}.",
        *(prose(note) + "." for note in rescored.notes),
        "### The dump alone",
        f"{explained_sentence(explained)} {prose(scope(explained))}.",
        measured(explained),
        *diagnosis_sections(explained, dump),
    ]
    return "\n\n".join(lines) + "\n"
