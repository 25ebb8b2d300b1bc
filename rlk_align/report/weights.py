"""The comparison of two sets of weights, as a document."""

import math

from rlk_align.report.document import DataTable, Document, Fact, Section
from rlk_align.weights.findings import EXPECTED, Finding, WeightsReport


def weights_document(report: WeightsReport) -> Document:
    """Returns the counts by status, then the parameters that are not equal."""
    counts = [f"{n:,} {status}" for status, n in report.counts.items() if n]
    unequal = [f for f in report.findings if f.status != "equal"]
    # Failures come first; the rest keeps the order of the model.
    unequal.sort(key=lambda f: f.status in EXPECTED)
    table = DataTable(
        name="parameters",
        caption="parameters that are not equal",
        columns=("parameter", "status", ""),
        rows=[[f.name, f.status, f"{f.detail}{_extent(f)}"] for f in unequal],
        names=3,
    )
    nothing = "A and B have no parameter in common: nothing was compared"
    return Document(
        status=report.status,
        headline=f"{len(report.findings):,} parameters: {', '.join(counts) or 'none'}",
        folder="",
        facts=[
            *(Fact(x, f"{path}  ({kind})") for x, path, kind in _sides(report)),
            *([Fact("adapter", str(report.adapter))] if report.adapter else []),
            *([Fact("earlier", ", ".join(report.earlier))] if report.earlier else []),
            *([] if report.compared else [Fact("doubt", nothing, "doubt")]),
        ],
        sections=[Section(heading="not equal", table=table)] if unequal else [],
        next_steps=[_next(report)] if report.exit_code == 1 else [],
    )


def _sides(report: WeightsReport) -> list[tuple[str, str, str]]:
    return [("A", report.a, report.kinds[0]), ("B", report.b, report.kinds[1])]


def _extent(f: Finding) -> str:
    if f.differing is None or f.max_abs_difference is None or f.a is None:
        return ""
    share = f.differing / math.prod(f.a.shape)
    return f"; {share:.2%} of the entries, by up to {f.max_abs_difference:.3g}"


def _next(report: WeightsReport) -> str:
    """Returns what to do about the most important kind of failure."""
    counts = report.counts
    if counts["stale"]:
        steps = sorted({f.step for f in report.findings if f.step})
        return f"these parameters were not synced since {', '.join(steps)}: check the sender"
    if counts["missing"]:
        return "check which names the sender and the receiver use for the missing parameters"
    if counts["unmerged"] and not counts["other"]:
        return (
            "the trainer's base is no longer that of A, and each synchronisation changes it again: "
            "merge a copy of the base, or restore the base after each merge"
        )
    if report.earlier:
        return (
            "B equals none of the earlier steps: check how it was converted or merged (--adapter)"
        )
    return (
        "give earlier checkpoints (--earlier) or the adapter (--adapter) to find the origin of the "
        "difference"
    )
