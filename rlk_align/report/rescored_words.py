"""Sentences about a rescored dump that its outputs share."""

import shlex

from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.words import percent
from rlk_align.report.words import engine_spec
from rlk_align.results import EdgeMetrics, EngineRecord

EDGE_COLUMNS = ("edge", "mean |Δ|", "share", "k3", "E[ρ]", "c", "looks like")


def edge_rows(rescored: Rescored) -> list[list[str]]:
    """A row for each edge, with the columns of EDGE_COLUMNS, and one for the dump's own Δ."""
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


def engine_words(engine: EngineRecord) -> str:
    """Which engine scored, in which dtype, with which checkpoint."""
    return f"{engine_spec(engine)}, {engine.dtype}, {engine.model}"


def breaches(rescored: Rescored) -> list[str]:
    """The limits that an edge does not keep."""
    return [
        f"{name}: {metric} is {value:.3g}, {bound:g} allowed"
        for name, (_, metric, value, bound) in rescored.breaches
    ]


def chosen(rescored: Rescored) -> str:
    """Which sequences were scored again."""
    tokens = f"{rescored.own.tokens:,} scored tokens"
    if not rescored.worst:
        return f"{tokens} of {rescored.chosen:,} sequences, all that can be scored"
    drawn = rescored.chosen - rescored.worst
    return (
        f"{tokens} of {rescored.chosen:,} of {rescored.usable:,} sequences: the "
        f"{rescored.worst:,} with the largest mean |Δ|, and {drawn:,} drawn by the seed"
    )


def temperature(rescored: Rescored) -> str:
    """At which temperature the ids were scored, and how."""
    if rescored.temperature == 1.0:
        return "temperature 1, over the whole vocabulary"
    return (
        f"temperature {rescored.temperature:g}, over the whole vocabulary: the recorded logits are "
        "divided by it, in float64"
    )


def next_command(text: str, dump: str, scores: str) -> str:
    """A command with the folders in the places of {DUMP} and {RUN}."""
    return text.format(DUMP=shlex.quote(dump), RUN=shlex.quote(scores))
