"""Makes dumps with the distributions and the noise of real engines, healthy or with a fault.

    python scripts/recorded_dumps.py prompts.jsonl
    rlk-align compare --rollout hf:dtype=bfloat16 --train megatron:dtype=bfloat16 \\
        --prompts prompts.jsonl --max-new-tokens 32 --sites logits,logprob --run-dir RUN
    python scripts/sweep_dumps.py --recorded RUN --out dumps.json

The first command writes the prompts. The captures of a run contain both engines' logits of every
sampled token: the rollout's logits are the distribution, and the trainer's minus the rollout's are
the noise. Faults are planted as in simulated dumps.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures"))

from corpus import sample_problem
from simulate_dumps import FAULTS, GROUP, Dump, Floats

from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.model.sites import RowIndex
from rlk_align.trace.numbered import read_rows
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

STEPS = 6
PROMPTS = 16


class Recording:
    """The sampled tokens of a run, with the logits of both engines."""

    def __init__(self, folder: Path) -> None:
        run = Run.open(str(folder))
        sides = [Trace(run.capture_folder(side)) for side in ("rollout", "train")]
        self.batch = sides[0].tokens
        index = RowIndex(self.batch)
        prompts = np.array([len(s.prompt_ids) for s in self.batch.samples])
        # The logits at a position are those of the next token.
        rows = np.flatnonzero(index.position >= prompts[index.sample]) - 1
        self.sequence = index.sample[rows]
        self.token = index.token[rows + 1]
        self.logits, self.train = (
            _logits(trace, name, index, rows)
            for trace, name in zip(sides, ("decode", "prefill"), strict=True)
        )
        self.dtype = sides[0].record.dtype


def _logits(trace: Trace, name: str, index: RowIndex, rows: NDArray[np.int64]) -> Floats:
    reader = trace.read_pass(name)
    recorded = read_rows(reader, "logits", index)
    assert recorded is not None, f"{trace.folder} has no logits"
    at = np.searchsorted(recorded.number, rows)
    assert np.array_equal(recorded.number[at], rows), f"{trace.folder} lacks logits of some tokens"
    return np.asarray(reader.values("logits", recorded.rows, recorded.at[at]).double().numpy())


class RecordedDump(Dump):
    """A dump of the tokens that the engines sampled; with `resample`, new tokens are drawn from the
    same distributions."""

    def __init__(self, recording: Recording, seed: int, resample: bool, turns: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        samples = recording.batch.samples
        numbers: dict[tuple[int, ...], int] = {}
        of_prompt = [numbers.setdefault(s.prompt_ids, len(numbers)) for s in samples]
        self.groups = np.array(of_prompt)
        self.steps = self.groups * STEPS // len(numbers)
        self.sequences = len(samples)
        self.sequence = recording.sequence
        self.lengths = np.bincount(self.sequence, minlength=len(samples))
        self.position = np.concatenate([np.arange(n) for n in self.lengths])
        self.logits, self.token = recording.logits, recording.token
        self.difference = recording.train - recording.logits
        self.resample = resample
        self.start_healthy(recording.dtype, turns)

    def sampled(self, law: Floats) -> NDArray[np.int64]:
        """[R]; the engines' tokens, or new draws."""
        return super().sampled(law) if self.resample else self.token

    def noise(self) -> Floats:
        """[R, V]; the difference of the engines' logits."""
        return self.difference


def planted(recording: Recording, name: str, seed: int) -> Sequences:
    """Returns the recording with a fault, at its greatest strength."""
    fault = FAULTS[name]
    dump = RecordedDump(recording, seed, resample=True, turns=fault.turns)
    fault.plant(dump, fault.strengths[-1])
    return dump.sequences_of()


def prompt_lines() -> list[str]:
    """Prompts of a solved problem and an open one, each for a group of samples."""
    draw = random.Random(7)
    lines = []
    for k in range(PROMPTS):
        solved, problem = sample_problem(draw), sample_problem(draw)
        text = f"{solved.prompt}{solved.solution}\n{problem.prompt}"
        lines += [
            json.dumps({"id": f"p{k:02d}-{j}", "prompt": text}, ensure_ascii=False) + "\n"
            for j in range(GROUP)
        ]
    return lines


def main() -> None:
    """Writes the prompts of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.parse_args().out.write_text("".join(prompt_lines()), encoding="utf-8")


if __name__ == "__main__":
    main()
