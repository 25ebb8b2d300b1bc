"""Fewer cases of a matrix, in which every two values still meet."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each parameter, such that every value of a parameter occurs with
    every value of every other. The choice is greedy, and the same each time."""
    rows = list(product(*(range(len(values)) for values in parameters)))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}

    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return [
        tuple(values[k] for values, k in zip(parameters, row, strict=True))
        for row in sorted(chosen)
    ]
