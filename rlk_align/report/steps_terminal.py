"""The steps of a monitored run on the terminal."""

from collections.abc import Iterator
from typing import Literal

from rich.table import Table
from rich.text import Text

from rlk_align.logs.monitor.record import Interval, StepRecord
from rlk_align.text import line

STYLES = {"fail": "bold red", "inconclusive": "bold yellow", "warn": "yellow"}
COLUMNS = (
    *("step", "tokens", "E[ρ] − 1", "c", "k1", "k3", "ESS", "clipped", "kl/entropy"),
    *("outliers", "lag", "reward", "findings"),
)


WIDTHS = {"step": 6, "tokens": 9, "E[ρ] − 1": 18, "c": 16, "reward": 7, "run": 12}
"""The least width of a column in characters; it is 8 for the others."""


def steps_table(steps: list[tuple[str, StepRecord]], several: bool, header: bool = True) -> Table:
    """Returns the last steps as a table, which names each step's run where there are `several`.
    Fixed widths align tables below one another, of which only the first has a `header`."""
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=header)
    for name in ("run", *COLUMNS) if several else COLUMNS:
        justify: Literal["left", "right"] = "left" if name in ("run", "findings") else "right"
        table.add_column(name, justify=justify, min_width=WIDTHS.get(name, 8))
    for run, record in steps:
        cells = [line(text) for text in cells_of(record)]
        table.add_row(*([line(run)] if several else []), *cells, _findings(record))
    return table


def cells_of(record: StepRecord) -> list[str]:
    """Returns the cells of COLUMNS; a dash where a figure is not known."""
    return [
        str(record.step),
        "–" if record.tokens is None else f"{record.tokens:,}",
        _with_interval(record.ratio_error),
        _with_interval(record.c),
        _number(record.k1),
        _number(None if record.k3 is None else record.k3.value),
        _number(record.ess, 4),
        _number(record.clip_fraction),
        _number(record.kl_entropy),
        _number(record.outliers),
        _number(record.version_lag),
        _number(record.reward, 3),
    ]


def _with_interval(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    return f"{interval.value:.2g} ± {(interval.high - interval.low) / 2:.1g}"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _findings(record: StepRecord) -> Text:
    text = Text()
    for finding in record.findings:
        text.append(" " if text else "").append(line(finding.name, STYLES[finding.level]))
    return text


def finding_lines(
    run: str, record: StepRecord, reported: set[tuple[str, str]] | None = None
) -> Iterator[Text]:
    """Yields each finding of a step in a sentence, except those whose (level, name) is in
    `reported`."""
    for finding in record.findings:
        if (finding.level, finding.name) in (reported or ()):
            continue
        where = f"{run}: step {record.step}" if run else f"step {record.step}"
        since = "" if finding.since is None else f" since step {finding.since}"
        head = line(f"{finding.level.upper()} {finding.name}{since}", STYLES[finding.level])
        figures = f" {where}: {finding.value:.3g}, limit {finding.limit:.3g}: {finding.why}"
        yield head.append(line(figures, "default"))
