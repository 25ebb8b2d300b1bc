"""A dump that engines scored again, as a document."""

from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.words import WHAT, percent
from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.report.explained import (
    breach_words,
    diagnosis_sections,
    measured,
    next_command,
    sentence,
    unknown,
)
from rlk_align.report.words import engine_spec
from rlk_align.results import EdgeMetrics


def rescored_document(rescored: Rescored, dump: str, scores: str) -> Document:
    """Returns the verdict on a rescored dump; `dump` and `scores` are the folders of the dump and
    of the scored run."""
    explained = rescored.explained
    breaches = [
        *(f"{edge}: {breach_words(breach)}" for edge, breach in rescored.breaches),
        *(f"the dump alone: {breach_words(breach)}" for breach in explained.breaches),
    ]
    return Document(
        status=rescored.status,
        headline=rescored.sentence,
        folder=scores,
        facts=[
            Fact("dump", f"{sentence(explained)} {dump}"),
            *(
                Fact(side, f"{engine_spec(e)}, {e.dtype}, {e.model}")
                for side, e in rescored.engines.items()
            ),
            Fact("scored", f"{chosen(rescored)}; {temperature(rescored)}"),
            *(Fact("note", note, "soft") for note in rescored.notes),
            *(Fact("doubt", doubt, "doubt") for doubt in rescored.doubts),
            *(Fact("breach", breach, "breach") for breach in breaches),
        ],
        sections=[
            Section(
                heading="the mismatch, edge by edge",
                table=DataTable(
                    name="edges",
                    caption="A token's Δ is the sum of its edges' Δ. Intervals are clustered by "
                    "sequence.",
                    columns=("edge", "mean |Δ|", "share", "k3", "E[ρ]", "c", "looks like"),
                    rows=_edge_rows(rescored),
                ),
                items=[f"{edge.name}: {WHAT[edge.name]}" for edge in rescored.edges],
            ),
            Section(heading="the dump alone", facts=measured(explained)),
            *diagnosis_sections(explained, dump),
            unknown(explained),
        ],
        next_steps=[next_command(rescored.next, DUMP=dump, RUN=scores)],
    )


def _edge_rows(rescored: Rescored) -> list[list[str]]:
    """Returns a row for each edge, and one for the dump's own Δ."""
    rows = []
    for edge in rescored.edges:
        equal = edge.metrics.tokens and not edge.metrics.bit_mismatches
        looks = edge.diagnosis or ("equal" if equal else "")
        c = f"{edge.c.value:.2g}"
        rows.append(_row(edge.name, edge.metrics, percent(edge.share), c, looks))
    return [*rows, _row("the dump", rescored.own, "", "", "")]


def _row(name: str, m: EdgeMetrics, share: str, c: str, looks: str) -> list[str]:
    numbers = (f"{m.mean_abs_dlogp:.2g}", share, f"{m.k3:.2g}")
    return [name, *numbers, f"{m.ratio_mean:.4f}", c, looks]


def chosen(rescored: Rescored) -> str:
    """States which sequences were scored again."""
    tokens = f"{rescored.own.tokens:,} scored tokens"
    if not rescored.worst:
        return f"{tokens} of {rescored.chosen:,} sequences, all that can be scored"
    drawn = rescored.chosen - rescored.worst
    return (
        f"{tokens} of {rescored.chosen:,} of {rescored.usable:,} sequences: the "
        f"{rescored.worst:,} with the largest mean |Δ|, and {drawn:,} drawn by the seed"
    )


def temperature(rescored: Rescored) -> str:
    """States at which temperature the ids were scored, and how."""
    if rescored.temperature == 1.0:
        return "temperature 1, over the whole vocabulary"
    return (
        f"temperature {rescored.temperature:g}, over the whole vocabulary: the recorded logits are "
        "divided by it, in float64"
    )
