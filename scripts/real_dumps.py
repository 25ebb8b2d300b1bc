"""Makes dumps of real runs on the embedded model: a healthy one, and one for each of six faults.

    python scripts/real_dumps.py FOLDER

vLLM samples and HF transformers trains (`rl_loop.py`). Nothing is edited afterwards: each fault is
the setting, the missing call or the wrong index that makes it in practice. FOLDER gets a neutral
file for each run, NAME.jsonl.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_loop import Rollout, Tasks, Trainer, lines

STEPS = 6
PROMPTS = 8
"""Prompts a step."""
SINGLE = 24
"""Prompts of a run of one step."""
RATE, FAST = 2e-4, 1e-3


@dataclass(frozen=True)
class Engines:
    """What the runs share: loading vLLM takes longer than running it."""

    tasks: Tasks
    rollout: Rollout

    def fresh(self, rate: float = RATE, lora: bool = False) -> Trainer:
        """Returns a new trainer, whose weights the rollout has."""
        trainer = Trainer(rate, lora)
        self.rollout.sync(Trainer(rate) if lora else trainer)
        return trainer


def healthy(e: Engines) -> Iterator[str]:
    yield from _series(e, e.fresh(), synced=True)


def stale_weights(e: Engines) -> Iterator[str]:
    """The trainer's steps never reach vLLM."""
    yield from _series(e, e.fresh(), synced=False)


def lora(e: Engines) -> Iterator[str]:
    """The trainer trains an adapter, and vLLM serves the base model."""
    yield from _series(e, e.fresh(2 * FAST, lora=True), synced=False)


def temperature_of_trainer(e: Engines) -> Iterator[str]:
    """vLLM samples and scores at 0.7; the trainer does not divide its logits."""
    trainer = e.fresh()
    samples = e.rollout.sample(e.tasks.take(SINGLE), 0, temperature=0.7)
    yield from lines(0, samples, trainer.score(samples))


def temperature_of_rollout(e: Engines) -> Iterator[str]:
    """vLLM samples at 0.7 and returns raw log-probs; the trainer divides its logits."""
    rollout = Rollout(e.tasks, "raw")
    trainer = Trainer(RATE)
    samples = rollout.sample(e.tasks.take(SINGLE), 0, temperature=0.7)
    yield from lines(0, samples, trainer.score(samples, 0.7))


def mask(e: Engines) -> Iterator[str]:
    """The mask counts from the token before the response."""
    trainer = e.fresh()
    samples = e.rollout.sample(e.tasks.take(SINGLE), 0)
    for line, sample in zip(lines(0, samples, trainer.score(samples)), samples, strict=True):
        prompt, total = len(sample.task.token_ids), len(sample.token_ids)
        flags = [prompt - 1 <= i < total - 1 for i in range(total)]
        yield line.replace('"dtype"', f'"mask": {str(flags).lower()}, "dtype"', 1)


def top_p(e: Engines) -> Iterator[str]:
    """vLLM's log-probs are of the law that top_p = 0.8 leaves; the trainer's are of all tokens."""
    trainer = e.fresh()
    samples = e.rollout.sample(e.tasks.take(SINGLE), 0, top_p=0.8)
    yield from lines(0, samples, trainer.score(samples))


def stale_cache(e: Engines) -> Iterator[str]:
    """Weights are updated and vLLM's prefix cache is not reset. Half of a step's prompts come back
    in every step, and the other half is new."""
    trainer = e.fresh(FAST)
    repeated = e.tasks.take(PROMPTS // 2)
    for step in range(STEPS):
        samples = e.rollout.sample(repeated + e.tasks.take(PROMPTS // 2), step)
        yield from lines(step, samples, trainer.score(samples))
        trainer.step(samples)
        e.rollout.sync(trainer, reset_cache=False)


def _series(e: Engines, trainer: Trainer, synced: bool) -> Iterator[str]:
    for step in range(STEPS):
        samples = e.rollout.sample(e.tasks.take(PROMPTS), step)
        yield from lines(step, samples, trainer.score(samples))
        trainer.step(samples)
        if synced:
            e.rollout.sync(trainer)


RUNS: dict[str, tuple[Callable[[Engines], Iterator[str]], str]] = {
    "healthy": (healthy, "numerics"),
    "temperature-of-trainer": (temperature_of_trainer, "temperature"),
    "mask": (mask, "mask-shifted"),
    "top-p": (top_p, "truncation"),
    "stale-cache": (stale_cache, "stale-cache"),
    "stale-weights": (stale_weights, "stale-weights"),
    "lora": (lora, "stale-weights"),
    # It has a vLLM of its own, which ends the others' process groups as it goes: so it is the last.
    "temperature-of-rollout": (temperature_of_rollout, "temperature"),
}
"""Run -> (how it is made, its diagnosis)."""


def write(folder: Path) -> None:
    """Makes every run."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = Tasks(seed=0)
    engines = Engines(tasks, Rollout(tasks))
    for name, (make, _) in RUNS.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(make(engines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
