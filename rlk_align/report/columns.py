"""The tables that reports print on a terminal."""

from collections.abc import Iterable

from rich.table import Table


def columns(names: Iterable[str], figures: Iterable[str]) -> Table:
    """A table without borders: columns of `names` to the left, columns of `figures` to the right,
    and nothing in it wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
