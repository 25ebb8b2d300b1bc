"""Makes a live run for `rlk-align monitor`: policy-gradient steps on the embedded model.

    python scripts/monitor_live.py FOLDER --sync-until 25 &
    rlk-align monitor FOLDER

vLLM samples and HF transformers trains (`rl_loop.py`). Each step becomes a neutral file,
FOLDER/step_N.jsonl. From step --sync-until on, the trainer's weights no longer reach vLLM; nothing
else changes. With --stop-early the loop monitors itself and ends when the monitor says so.
"""

import argparse
from pathlib import Path

import numpy as np
from rl_loop import Rollout, Tasks, Trainer, records, text_of

from rlk_align.files import whole_file
from rlk_align.logs.monitor.record import StepRecord
from rlk_align.logs.monitor.run_monitor import RunMonitor

PROMPTS = 4
RATE = 2e-4


def run(folder: Path, steps: int, sync_until: int, stop_early: bool) -> None:
    """Trains for `steps` steps, or until the monitor stops it."""
    folder.mkdir(parents=True, exist_ok=True)
    monitor = RunMonitor(patience=2, on_step=show)
    tasks, trainer = Tasks(seed=1), Trainer(RATE)
    rollout = Rollout(tasks)
    for step in range(steps):
        if 0 < step < sync_until:
            rollout.sync(trainer)
        samples = rollout.sample(tasks.take(PROMPTS), seed=step)
        scores = trainer.score(samples)
        with whole_file(folder / f"step_{step}.jsonl") as file:
            file.write_text(text_of(records(step, samples, scores)), encoding="utf-8")
        monitor.arrays(
            step,
            padded([s.logprobs for s in samples]),
            padded([t[-len(s.response) :] for s, t in zip(samples, scores, strict=True)]),
            padded([[1.0] * len(s.response) for s in samples]) == 1,
            rewards=[s.reward for s in samples],
        )
        if stop_early and monitor.stop:
            print(f"stopped at step {step}", flush=True)
            return
        trainer.step(samples)


def padded(rows: list[list[float]]) -> np.ndarray:
    """Returns the rows as an array [B, T], padded on the right with 0."""
    array = np.zeros((len(rows), max(map(len, rows))))
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return array


def show(record: StepRecord) -> None:
    """Prints the findings of a step."""
    findings = ", ".join(f"{f.level}: {f.name}" for f in record.findings)
    print(f"step {record.step}: {record.tokens} tokens; {findings or 'healthy'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sync-until", type=int, default=10**9)
    parser.add_argument("--stop-early", action="store_true")
    options = parser.parse_args()
    run(options.folder, options.steps, options.sync_until, options.stop_early)
