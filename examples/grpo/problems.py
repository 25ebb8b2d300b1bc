"""Problems whose answer can be checked, of the corpus that the embedded model was trained on.

Which problems a step has follows from the seed and the step alone, so that a resumed run goes on
with the same ones. The held-out set shares no question with any of them.
"""

import functools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

from corpus import FAMILIES, Problem, check, final_answer

LEARNABLE = ("add", "subtract", "multiply", "sequence", "largest", "story", "count", "sort")
"""Families of which the embedded model solves some and misses some."""
HELD_OUT_SEED = "held out"


def draw(rng: random.Random, families: tuple[str, ...] = LEARNABLE) -> Problem:
    """Of one of the families."""
    return FAMILIES[rng.choice(families)](rng)


@functools.cache
def held_out(count: int, families: tuple[str, ...] = LEARNABLE) -> tuple[Problem, ...]:
    """`count` different problems that no step trains on."""
    rng, found = random.Random(HELD_OUT_SEED), {}
    while len(found) < count:
        problem = draw(rng, families)
        found[problem.prompt] = problem
    return tuple(found.values())


def training(
    seed: int, step: int, count: int, excluded: int, families: tuple[str, ...] = LEARNABLE
) -> list[Problem]:  # fmt: skip
    """The problems of a step, none of them among the `excluded` first ones that are held out."""
    kept_back = {problem.prompt for problem in held_out(excluded, families)}
    rng, found = random.Random(f"{seed} {step}"), []
    while len(found) < count:
        problem = draw(rng, families)
        if problem.prompt not in kept_back:
            found.append(problem)
    return found


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
