"""The folder of one side's recordings.

SIDE/
  step-00000300/rank-0/     a trace of the passes of one rank, complete once it has this name
  step-00000350/rank-0.partial/     a step that is not complete
    reason.txt              why it never will be, if the process could say so
    recording.json          which step and rank it is, and which of its samples were chosen
    model/                  config.json and, if they were saved, the weights of that step
  .rank-0.lock              held by the process that records

A trainer of several ranks has a lock and a shard for each: `rlk_align.record.train.rank_shard`.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlk_align.results import SideName
from rlk_align.trace.records import Record

SHARED = "shared"
"""The folder of a step with what its ranks have in common."""
SHARED_FILES = ("trace.json", "prompts.jsonl", "weights.parquet")
"""The files there that its checksums list."""
ADAPTER = "adapter"
"""The folder beside trace.json with the adapter of the step, in PEFT's layout."""
RECORDING = "recording.json"
REASON = "reason.txt"
PARTIAL = ".partial"
_STEP = re.compile(r"step-(\d{8,})")
_RANK = re.compile(r"rank-\d+")


class RequestRecord(Record):
    """How a rollout engine computed one of the recorded requests."""

    sample: int
    request: str
    """Its id in the engine."""
    chunks: int
    """The number of forwards that computed its prompt."""
    cached: int
    """The number of its first tokens that the engine took from its cache."""
    preemptions: int
    """How often the scheduler took its cache away."""
    recomputed: int
    """The number of rows that were computed once more afterwards."""
    left_out: str = ""
    """Why it cannot be chosen; empty if it can."""


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
    requests: list[RequestRecord] = Field(default_factory=list)
    """The recorded requests of a server."""
    unrecorded: dict[str, int] = Field(default_factory=dict)
    """Why requests of the step could not be recorded -> how many."""
    weight_version: str = ""
    """The version of the weights by the engine's own count, where it counts."""


def step_folder(side: Path, step: int) -> Path:
    """The folder of a step of one side."""
    return side / f"step-{step:08d}"


def steps_of(side: Path) -> dict[int, Path]:
    """Step -> the folder of a complete recording."""
    return {n: path for n, path in _step_folders(side).items() if shards_of(path)}


def shards_of(step: Path) -> list[Path]:
    """The complete shards of a step, by rank."""
    found = [path.parent for path in step.glob(f"rank-*/{RECORDING}")]
    return sorted(
        (path for path in found if _RANK.fullmatch(path.name)),
        key=lambda path: int(path.name.removeprefix("rank-")),
    )


def incomplete_steps(side: Path) -> dict[int, str]:
    """Step -> why it is not complete."""
    return {
        step: reason_of(path) for step, path in _step_folders(side).items() if not shards_of(path)
    }


def next_step(side: Path) -> int:
    """The number after the last step that was begun."""
    return max(_step_folders(side), default=-1) + 1


def is_recording(name: str) -> bool:
    """Whether a folder has recordings of one side, or is one step of them."""
    folder = Path(name)
    return bool(steps_of(folder)) or bool(shards_of(folder))


def _step_folders(side: Path) -> dict[int, Path]:
    found = {int(m[1]): path for path in side.glob("step-*") if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def reason_of(step: Path) -> str:
    """Why shards of a step are not complete."""
    said = [path.read_text("utf-8", "replace") for path in sorted(step.glob(f"*/{REASON}"))]
    return "; ".join(dict.fromkeys(said)) or "a process was ended, or still records it"
