"""The folder of one side's recordings.

SIDE/
  step-00000300/rank-0/     a trace of the passes of one rank, complete once it has this name
    recording.json          which step and rank it is, and which of its samples were chosen
    model/                  config.json and, if they were saved, the weights of that step
  .rank-0.lock              held by the process that records

A trainer of several ranks has a lock and a shard for each, as `rlk_align.record.rank_shard` says.
"""

import re
from pathlib import Path
from typing import Literal

from rlk_align.results import SideName
from rlk_align.trace.records import Record

SHARED = "shared"
"""The folder of a step with what its ranks have in common."""
SHARED_FILES = ("trace.json", "prompts.jsonl", "weights.parquet")
"""The files there that its checksums list."""
RECORDING = "recording.json"
_STEP = re.compile(r"step-(\d{8,})")


class RecordingRecord(Record):
    """recording.json."""

    schema_id: Literal["rlk-align/recording/1"] = "rlk-align/recording/1"
    side: SideName
    step: int
    rank: int = 0
    ranks: int = 1
    replica: int = 0
    """Ranks of one replica see the same sequences, and record other sites of them."""
    job: str = ""
    """A random number of the job; empty where one rank writes all."""
    sequences: int
    """How many sequences were asked for."""
    seen: int
    """How many sequences of the step were seen, of which these were chosen."""
    chosen: list[int]
    """The samples of the trace that were chosen in the end; others were displaced by them."""
    passes: list[str]


def step_folder(side: Path, step: int) -> Path:
    """The folder of a step of one side."""
    return side / f"step-{step:08d}"


def steps_of(side: Path) -> dict[int, Path]:
    """Step -> the folder of a complete recording."""
    found = {int(m[1]): path for path in side.glob("step-*") if (m := _STEP.fullmatch(path.name))}
    return {n: path for n, path in sorted(found.items()) if any(path.glob(f"rank-*/{RECORDING}"))}


def is_recording(name: str) -> bool:
    """Whether a folder has recordings of one side, or is one step of them."""
    folder = Path(name)
    return bool(steps_of(folder)) or any(folder.glob(f"rank-*/{RECORDING}"))
