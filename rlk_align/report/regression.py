"""The comparison of a run with an earlier one, as a document."""

from pathlib import Path

from rlk_align.judge.regression import RegressionCheck, RegressionVerdict
from rlk_align.report.document import DataTable, Document, Fact, Section


def regression_document(
    verdict: RegressionVerdict, folders: tuple[Path, Path] | None = None
) -> Document:
    """Returns the figures of whole edges, and those of operators that are worse than allowed.
    `folders`: those of the runs before and after."""
    contract, checks = verdict.contract, verdict.checks
    shown = [c for c in checks if c.site is None or not c.holds]
    table = DataTable(
        name="figures",
        caption="figures before and after",
        columns=("", "edge", "where", "metric", "before", "after", "allowed"),
        rows=[_cells(c) for c in shown],
        names=4,
    )
    runs = zip(("before", "after"), map(str, folders or ()), strict=False)
    return Document(
        status=verdict.status,
        headline=finding(verdict),
        folder="",
        facts=[
            Fact("contract", f"{contract.id} {contract.version}, its regression limits"),
            *(Fact(when, folder) for when, folder in runs),
            *(Fact("doubt", doubt, "doubt") for doubt in verdict.doubts),
        ],
        sections=[Section(heading="figures", table=table)] if shown and not verdict.doubts else [],
    )


def _cells(check: RegressionCheck) -> list[str]:
    figures = (f"{x:.3g}" for x in (check.before, check.after, check.allowed))
    where = " ".join(filter(None, [check.side, check.site]))
    return ["" if check.holds else "worse", check.edge, where, check.metric, *figures]


def finding(verdict: RegressionVerdict) -> str:
    """Returns the verdict in a sentence."""
    if verdict.doubts:
        return f"Nothing can be concluded: {verdict.doubts[0]}"
    count = len(verdict.checks)
    if verdict.worse:
        return f"{len(verdict.worse)} of {count} figures are worse than allowed."
    return f"None of {count} figures is worse than allowed."
