"""Imported runs that are written from arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.dumps.sequences import UNKNOWN, Sequences, join
from rlk_align.logs.dumps.table import SCHEMA
from rlk_align.logs.readers.importing import import_dump


def imported_run(run: Sequences, folder: Path) -> ImportedRun:
    """Writes sequences as an imported run."""
    rows = [_row(run, k) for k in range(len(run))]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    made = ImportedRun(folder)
    made.write([batch], Findings(), command=["rlk-align", "import"], format="jsonl")
    return made


def sequences_in(folder: Path, run: Path) -> Sequences:
    """Imports what lies in a folder of steps into `run`, and returns it."""
    import_dump("auto", [folder], run, ["rlk-align", "import"])
    return join(list(ImportedRun.open(str(run)).sequences()))


def _row(run: Sequences, k: int) -> dict[str, Any]:
    tokens = slice(run.offsets[k], run.offsets[k + 1])
    step, pack = int(run.steps[k]), int(run.pack_indices[k])
    return {
        "id": run.ids[k],
        "group": run.groups[k],
        "step": None if step == UNKNOWN else step,
        "pack_index": None if pack == UNKNOWN else pack,
        "prompt_length": int(run.prompt_lengths[k]),
        "token_ids": run.token_ids[tokens],
        "mask": run.scored[tokens],
        "rollout_logprobs": _values(run.rollout[tokens], run.rollout_missing[tokens]),
        "train_logprobs": _values(run.train[tokens], run.train_missing[tokens]),
        "rollout_dtype": run.rollout_dtypes[k],
        "train_dtype": run.train_dtypes[k],
    }


def _values(values: np.ndarray, missing: np.ndarray) -> list[float | None]:
    return [None if gone else float(v) for v, gone in zip(values, missing, strict=True)]
