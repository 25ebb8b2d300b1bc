"""A small set of rows of a matrix that still holds every combination of interest."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def covering(rows: Sequence[Row], goals: Callable[[Row], frozenset[Hashable]]) -> list[Row]:
    """Rows that together reach every goal that any row reaches.

    The choice is greedy and deterministic: each step takes the row that reaches the most goals
    which are still missing, and the first of equals.
    """
    reached = [(row, goals(row)) for row in rows]
    missing = frozenset[Hashable]().union(*(own for _, own in reached))
    chosen = []
    while missing:
        row, own = max(reached, key=lambda one: len(one[1] & missing))
        chosen.append(row)
        missing -= own
    return chosen
