"""A small set of rows of a matrix that still holds every combination of interest."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heapreplace
from itertools import combinations, product
from typing import Any, TypeVar

Row = TypeVar("Row")


def covering(
    rows: Sequence[Row], goals: Callable[[Row], frozenset[Hashable]], rarest: bool = False
) -> list[Row]:
    """Rows that together reach every goal that any row reaches.

    The choice is greedy and deterministic: each step takes the row that reaches the most goals
    which are still missing, and the first of equals. `rarest`: a goal counts for the more, the
    fewer rows reach it, so that rows which nothing can replace are taken first.
    """
    reached = [goals(row) for row in rows]
    missing = Counter(goal for own in reached for goal in own)
    weights = {goal: 10**9 // count if rarest else 1 for goal, count in missing.items()}
    # What a row adds never grows, so a row that is still the best at a second look is the best.
    best = [(-sum(weights[goal] for goal in own), row) for row, own in enumerate(reached)]
    heapify(best)
    chosen = []
    while missing:
        known, row = best[0]
        gain = sum(weights[goal] for goal in reached[row] if goal in missing)
        if gain < -known:
            heapreplace(best, (-gain, row))
            continue
        chosen.append(rows[row])
        for goal in reached[row]:
            missing.pop(goal, None)
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
