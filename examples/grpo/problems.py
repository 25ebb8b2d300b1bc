"""Problems whose answer can be checked, of the corpus that the embedded model was trained on.

Which problems a step has follows from the seed and the step alone, so that a resumed run goes on
with the same ones. The held-out set shares no question with any of them.
"""

import functools
import random
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

from corpus import FAMILIES, Problem, check, final_answer

LEARNABLE = ("add", "subtract", "multiply", "sequence", "largest", "story", "count", "sort")
"""Families of which the embedded model solves some and misses some."""
HELD_OUT_SEED = "held out"
MOST_MISSED = 10_000
"""Draws in a row without a new problem, after which there are no others."""


def draw(rng: random.Random, families: tuple[str, ...] = LEARNABLE) -> Problem:
    """Of one of the families."""
    return FAMILIES[rng.choice(families)](rng)


def _others(
    rng: random.Random, families: tuple[str, ...], known: Collection[str]
) -> Iterator[Problem]:
    """Drawn problems whose prompts are not `known`. Raises ValueError where there are none."""
    missed = 0
    while missed < MOST_MISSED:
        problem = draw(rng, families)
        missed += 1
        if problem.prompt not in known:
            missed = 0
            yield problem
    raise ValueError(
        f"of the families {', '.join(families)} there are no problems but {len(known)} that are "
        "held out; hold out fewer (--held-out), or take more --families"
    )


@functools.cache
def held_out(count: int, families: tuple[str, ...] = LEARNABLE) -> tuple[Problem, ...]:
    """`count` different problems that no step trains on. Raises ValueError where there are not as
    many."""
    rng, found = random.Random(HELD_OUT_SEED), dict[str, Problem]()
    others = _others(rng, families, found)
    while len(found) < count:
        problem = next(others)
        found[problem.prompt] = problem
    return tuple(found.values())


def training(
    seed: int, step: int, count: int, excluded: int, families: tuple[str, ...] = LEARNABLE
) -> list[Problem]:  # fmt: skip
    """The problems of a step, none of them among the `excluded` first ones that are held out.
    Raises ValueError where there are no others."""
    kept_back = {problem.prompt for problem in held_out(excluded, families)}
    others = _others(random.Random(f"{seed} {step}"), families, kept_back)
    return [next(others) for _ in range(count)]


def observation(problem: Problem, text: str) -> str | None:
    """What a checker says to a finished answer: nothing to a right one; else the question again,
    for another try. These tokens are the tool's, and nobody sampled them."""
    return None if check(problem, text) else problem.prompt.removesuffix("A:") + "Wrong. A:"


def reward(problem: Problem, tries: list[str]) -> float:
    """1 for a right first answer, 0.5 for a right later one, and 0.1 for an answer of the right
    form, whatever its value."""
    if check(problem, tries[0]):
        return 1.0
    if any(check(problem, text) for text in tries[1:]):
        return 0.5
    return 0.1 if final_answer(tries[0]) is not None else 0.0
