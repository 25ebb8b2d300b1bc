"""A training step on disk: `step_000007_rank_0_of_2.jsonl`, one file for each rank.

A file gets its name when it is complete, and the name has the number of the step's files. A program
that follows the folder therefore needs no marker of a complete step.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rlk_align.errors import DumpError, TraceNotWritten
from rlk_align.files import whole_file
from rlk_align.logs.dumps.record import SCHEMA
from rlk_align.logs.writers.batch import Record


def write_step(
    folder: str | Path, step: int, records: Sequence[Record], *, rank: int = 0, ranks: int = 1
) -> Path:
    """Writes all samples of a training step on this rank, and returns the file.

    Each of the `ranks` processes with samples writes its own file. A repeated step replaces its
    earlier files, for any number of ranks. Raises DumpError if there is no sample, and
    TraceNotWritten if the file cannot be written.
    """
    if not records:
        raise DumpError(f"step {step} has no sample", "write a step after its batch was made")
    if step < 0 or not 0 <= rank < ranks:
        raise DumpError(f"step {step}, rank {rank} of {ranks}", "steps and ranks count from 0")
    path = Path(folder) / f"step_{step:06d}_rank_{rank}_of_{ranks}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for earlier in path.parent.glob(f"step_{step:06d}_rank_*.jsonl"):
            if not earlier.name.endswith(f"_of_{ranks}.jsonl"):
                earlier.unlink(missing_ok=True)
        with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            for number, record in enumerate(records):
                head = {"schema": SCHEMA, "id": f"{step}-{rank}-{number}", "step": step}
                file.write(json.dumps(head | record) + "\n")
    except OSError as error:
        raise TraceNotWritten(
            f"log-probs could not be written to {path}: {error.strerror}",
            "name a folder that can be written to, on a disk with space",
        ) from error
    return path
