"""Problems whose answers can be checked, from the corpus that the embedded model was trained on.

The seed and the step alone decide the problems of a step, so that a resumed run continues with the
same problems. The held-out set shares no question with any step.
"""

import functools
import random
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

from corpus import FAMILIES, Problem, check, final_answer

LEARNABLE = ("add", "subtract", "multiply", "sequence", "largest", "story", "count", "sort")
"""Families in which the embedded model solves some problems and misses others."""
HELD_OUT_SEED = "held out"
MOST_MISSED = 10_000
"""After so many draws in a row without a new problem, the families are exhausted."""


def draw(rng: random.Random, families: tuple[str, ...] = LEARNABLE) -> Problem:
    """A random problem of one of the families."""
    return FAMILIES[rng.choice(families)](rng)


def _others(
    rng: random.Random, families: tuple[str, ...], known: Collection[str]
) -> Iterator[Problem]:
    """Yields random problems whose prompts are not `known`. Raises ValueError if there are none."""
    missed = 0
    while missed < MOST_MISSED:
        problem = draw(rng, families)
        missed += 1
        if problem.prompt not in known:
            missed = 0
            yield problem
    raise ValueError(
        f"the families {', '.join(families)} have no problems except {len(known)} that are held "
        "out; hold out fewer (--held-out), or choose more --families"
    )


@functools.cache
def held_out(count: int, families: tuple[str, ...] = LEARNABLE) -> tuple[Problem, ...]:
    """`count` different problems that no step trains on. Raises ValueError if there are fewer."""
    by_prompt: dict[str, Problem] = {}
    others = _others(random.Random(HELD_OUT_SEED), families, by_prompt)
    while len(by_prompt) < count:
        problem = next(others)
        by_prompt[problem.prompt] = problem
    return tuple(by_prompt.values())


def training(
    seed: int, step: int, count: int, excluded: int, families: tuple[str, ...] = LEARNABLE
) -> list[Problem]:  # fmt: skip
    """The problems of a step, without the first `excluded` held-out ones. Raises ValueError if
    there are no others."""
    known = {problem.prompt for problem in held_out(excluded, families)}
    others = _others(random.Random(f"{seed} {step}"), families, known)
    return [next(others) for _ in range(count)]


def observation(problem: Problem, text: str) -> str | None:
    """A checker's reply to a finished answer: None to a right one, and otherwise the question
    again, for another try. These tokens are the tool's, not sampled ones."""
    return None if check(problem, text) else problem.prompt.removesuffix("A:") + "Wrong. A:"


def reward(problem: Problem, tries: list[str]) -> float:
    """1 if the first try is right, 0.5 if a later one is, and 0.1 if the first try has the right
    form and a wrong value."""
    if check(problem, tries[0]):
        return 1.0
    if any(check(problem, text) for text in tries[1:]):
        return 0.5
    return 0.1 if final_answer(tries[0]) is not None else 0.0
