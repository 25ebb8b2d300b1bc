"""A compared run and its figures, for notebooks; needs neither an engine nor torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_align.errors import BadOption
from rlk_align.judge.verdict import Verdict
from rlk_align.probe.record import Probe
from rlk_align.report.source import ReportSource
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import EdgeMetrics, RoundingErrors, SiteResult

Columns = dict[str, list[Any]]
"""Columns of a table, all of one length, as `pandas.DataFrame(columns)`, `polars.DataFrame(...)`
and `pyarrow.table(...)` take them."""

METRICS = tuple(name for name in EdgeMetrics.model_fields if name != "noise")
FIGURES_OF_SITES = tuple(
    name
    for name in SiteResult.model_fields
    if name not in ("frontier", "first_introduced", "first_nonfinite")
)
OF_OPERATORS = ("side", "passname", "site", "layer", "op", "op_class", "dtype", "rows", "reason")
ROUNDINGS = tuple(name for name in RoundingErrors.model_fields if name not in ("row", "pattern"))


@dataclass(frozen=True)
class LoadedRun:
    """A run with its verdict and its figures."""

    source: ReportSource

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.source.folder

    @property
    def verdict(self) -> Verdict:
        """The run's verdict, by the contract that it was loaded with."""
        return self.source.verdict

    @property
    def probe(self) -> Probe | None:
        """The result of `rlk-align probe`; None where the run was not probed."""
        return self.source.probe

    def json(self) -> dict[str, Any]:
        """Returns the verdict for programs, `rlk-align/verdict/1`."""
        return verdict_json(self.verdict, self.probe)

    def edges(self) -> Columns:
        """Returns a row for each edge: its metrics over the sampled tokens, and whether it is
        judged."""
        compared = self.verdict.comparison
        rows = (
            {
                "edge": e.name,
                "judged": e.name in compared.judged,
                **_values(e.metrics, METRICS),
                "c": e.metrics.noise.c if e.metrics.noise else math.nan,
            }
            for e in compared.edges
        )
        return _columns(("edge", "judged", *METRICS, "c"), rows)

    def sites(self) -> Columns:
        """Returns a row for each site of each edge, in execution order: how many rows differ, how
        many are introduced there, and how large the errors are."""
        rows = (
            {"edge": e.name, **_values(site, FIGURES_OF_SITES)}
            for e in self.verdict.comparison.edges
            for site in e.sites
        )
        return _columns(("edge", *FIGURES_OF_SITES), rows)

    def operators(self) -> Columns:
        """Returns a row for each operator of each pass, in execution order: its error against
        float64 in roundings, or null with the reason where it could not be recomputed."""
        rows = (
            {
                **_values(unit, OF_OPERATORS),
                **(_values(unit.errors, ROUNDINGS) if unit.errors else dict.fromkeys(ROUNDINGS)),
            }
            for unit in self.verdict.comparison.referee
        )
        return _columns((*OF_OPERATORS, *ROUNDINGS), rows)

    def tokens(self) -> Columns:
        """Returns a row for each token of each edge: its id and text, the log-probs of the *next*
        token by the edge's two passes, and their difference `dlogp`; null where the next token was
        not sampled."""
        import pyarrow.compute as pc

        from rlk_align.comparison_table import HEAD

        if not self.source.run.has_rows:
            raise BadOption(
                f"{self.folder} has no comparison.parquet: an older version compared the run",
                "compare it again",
            )
        table = self.source.run.rows(list(HEAD))
        dlogp = pc.subtract(table["second_logprob"], table["first_logprob"])
        return table.append_column("dlogp", dlogp).to_pydict()


def _values(record: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _columns(names: Sequence[str], rows: Iterable[dict[str, Any]]) -> Columns:
    table = list(rows)
    return {name: [row[name] for row in table] for name in names}
