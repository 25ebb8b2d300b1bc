"""Markdown tables of the benchmark records."""

import math
from collections.abc import Iterator
from typing import Any

MEANS = ("ratio", "share")
"""The last words of columns whose geometric mean is printed."""


def markdown(record: Any, title: str) -> Iterator[str]:
    """Yields the lines of a record: a table for a list of dicts, a line for any other value."""
    if isinstance(record, list) and record and all(isinstance(row, dict) for row in record):
        yield from ["", f"### {title}", "", *_table([dict(flat(row)) for row in record])]
    elif isinstance(record, dict):
        for name, value in record.items():
            yield from markdown(value, f"{title}, {name}")
    else:
        yield f"{title}: {cell(record)}"


def flat(row: dict, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (column, value) of a row; the key of a nested dict precedes its columns."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name} ")
        else:
            yield f"{before}{name}", value


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    return str(value)


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for row in rows:
        yield "| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |"
    for column in columns:
        values = [row[column] for row in rows if column in row]
        if column.endswith(MEANS) and all(isinstance(x, float) and x > 0 for x in values):
            mean = math.exp(sum(map(math.log, values)) / len(values))
            yield f"\n{column}: geometric mean {mean:.3f}, lowest {min(values):.2f}"
