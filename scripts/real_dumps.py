"""Makes dumps of real runs on the embedded model: a healthy run, and one for each of seven faults.

    python scripts/real_dumps.py FOLDER

vLLM samples and HF transformers trains (`rl_loop.py`). No value is edited afterwards: each fault is
the setting, the missing call or the wrong index that causes it in practice. The neutral file of a
run is FOLDER/NAME.jsonl.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_loop import Rollout, Tasks, Trainer, records, text_of

STEPS = 6
PROMPTS = 8
"""Prompts of a step."""
SINGLE = 24
"""Prompts of a run of one step."""
RATE, FAST = 2e-4, 1e-3
Dump = Iterator[dict[str, Any]]
"""The records of a run's neutral file."""


@dataclass(frozen=True)
class Engines:
    """The engines that the runs share, because loading vLLM takes longer than running it."""

    tasks: Tasks
    rollout: Rollout

    def fresh(self, rate: float = RATE, lora: bool = False) -> Trainer:
        """Returns a new trainer, after the rollout has loaded its weights."""
        trainer = Trainer(rate, lora)
        self.rollout.sync(Trainer(rate) if lora else trainer)
        return trainer


def healthy(e: Engines) -> Dump:
    yield from _series(e, e.fresh(), synced=True)


def stale_weights(e: Engines) -> Dump:
    """The trainer's steps never reach vLLM."""
    yield from _series(e, e.fresh(), synced=False)


def lora(e: Engines) -> Dump:
    """The trainer trains an adapter, and vLLM serves the base model."""
    yield from _series(e, e.fresh(2 * FAST, lora=True), synced=False)


def temperature_of_trainer(e: Engines) -> Dump:
    """vLLM samples and scores at 0.7; the trainer does not divide its logits."""
    trainer = e.fresh()
    samples = e.rollout.sample(e.tasks.take(SINGLE), 0, temperature=0.7)
    yield from records(0, samples, trainer.score(samples))


def temperature_of_rollout(e: Engines) -> Dump:
    """vLLM samples at 0.7 and returns raw log-probs; the trainer divides its logits."""
    rollout = Rollout(e.tasks, "raw")
    trainer = Trainer(RATE)
    samples = rollout.sample(e.tasks.take(SINGLE), 0, temperature=0.7)
    yield from records(0, samples, trainer.score(samples, 0.7))


def mask(e: Engines) -> Dump:
    """The mask counts from the token before the response."""
    trainer = e.fresh()
    samples = e.rollout.sample(e.tasks.take(SINGLE), 0)
    for record, sample in zip(records(0, samples, trainer.score(samples)), samples, strict=True):
        prompt, total = len(sample.task.token_ids), len(sample.token_ids)
        flags = [prompt - 1 <= i < total - 1 for i in range(total)]
        yield record | {"mask": flags}


def top_p(e: Engines) -> Dump:
    """vLLM's log-probs are renormalized over the tokens that top_p = 0.8 keeps; the trainer's are
    over all tokens."""
    trainer = e.fresh()
    samples = e.rollout.sample(e.tasks.take(SINGLE), 0, top_p=0.8)
    yield from records(0, samples, trainer.score(samples))


def stale_cache(e: Engines) -> Dump:
    """Weights are updated, but vLLM's prefix cache is not reset. Half of the prompts are the same
    in every step, and the others are new."""
    trainer = e.fresh(FAST)
    repeated = e.tasks.take(PROMPTS // 2)
    for step in range(STEPS):
        samples = e.rollout.sample(repeated + e.tasks.take(PROMPTS // 2), step)
        yield from records(step, samples, trainer.score(samples))
        trainer.step(samples)
        e.rollout.sync(trainer, reset_cache=False)


def _series(e: Engines, trainer: Trainer, synced: bool) -> Dump:
    for step in range(STEPS):
        samples = e.rollout.sample(e.tasks.take(PROMPTS), step)
        yield from records(step, samples, trainer.score(samples))
        trainer.step(samples)
        if synced:
            e.rollout.sync(trainer)


RUNS: dict[str, Callable[[Engines], Dump]] = {
    "healthy": healthy,
    "temperature-of-trainer": temperature_of_trainer,
    "mask": mask,
    "top-p": top_p,
    "stale-cache": stale_cache,
    "stale-weights": stale_weights,
    "lora": lora,
    # This run comes last, because it has a vLLM of its own, which ends the process groups of the
    # other.
    "temperature-of-rollout": temperature_of_rollout,
}


def write(folder: Path) -> None:
    """Makes every run."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = Tasks(seed=0)
    engines = Engines(tasks, Rollout(tasks))
    for name, make in RUNS.items():
        (folder / f"{name}.jsonl").write_text(text_of(make(engines)), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
