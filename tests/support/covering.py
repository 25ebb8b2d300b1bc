"""A small set of rows of a matrix that still holds every combination of interest."""

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

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


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each parameter, such that every value of a parameter occurs with
    every value of every other."""
    rows = list(product(*(range(len(values)) for values in parameters)))
    chosen = covering(rows, lambda row: frozenset(combinations(enumerate(row), 2)))
    return [
        tuple(values[k] for values, k in zip(parameters, row, strict=True))
        for row in sorted(chosen)
    ]
