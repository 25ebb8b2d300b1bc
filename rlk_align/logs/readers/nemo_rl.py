"""NeMo-RL: `train_data_step{N}.jsonl`, a sample a line.

Each field is nested in a list of one entry, because it was a batch of one; some scripts unnest it.
Lists are padded on the right to the longest one of the batch. Index t scores token t; the value at
index 0 is a filler.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.files import first_object, json_object, read_lines, require
from rlk_align.logs.readers.missing import ZERO_IS_MISSING, compared_columns
from rlk_align.logs.readers.values import cut, flags, integers, numbers, unnested, whole_number
from rlk_align.progress import Progress

FIELDS = (
    *("token_ids", "token_loss_mask", "sample_loss_mask", "input_lengths"),
    *("generation_logprobs", "prev_logprobs"),
)
_STEP = re.compile(r"train_data_step(\d+)$")


def read(files: list[Path], findings: Findings, progress: Progress) -> Iterator[Row]:
    """Yields the samples, step by step. If a step was written twice, the later file is read. Raises
    DumpError."""
    findings.note(ZERO_IS_MISSING)
    newest: dict[object, Path] = {}
    for path in sorted(files):
        step = _step(path)
        key = path if step is None else step
        if key in newest:
            findings.skip(f"{newest[key]}: step {step} was written again, in {path}")
        newest[key] = path
    for path in sorted(newest.values(), key=lambda path: (_step(path) or 0, path)):
        yield from read_lines(path, findings, progress, partial(_row, _step(path), findings))


def _step(path: Path) -> int | None:
    found = _STEP.search(path.stem)
    return int(found[1]) if found else None


def _row(step: int | None, findings: Findings, line: bytes, line_number: int) -> Row:
    record = json_object(line)
    require(record, FIELDS)
    length = whole_number(record["input_lengths"], "input_lengths")
    ids = cut(integers(unnested(record["token_ids"]), "token_ids"), length, "token_ids")
    mask = cut(
        pa.array(flags(unnested(record["token_loss_mask"]), "token_loss_mask")),
        length,
        "token_loss_mask",
    )
    counted = bool(flags([unnested(record["sample_loss_mask"])], "sample_loss_mask")[0])
    sampled = np.array(mask, dtype=bool)
    # Nothing predicts column 0, so the loss omits it.
    sampled[:1] = False
    generated, scored_again = (
        cut(numbers(unnested(record[name]), name), length, name)
        for name in ("generation_logprobs", "prev_logprobs")
    )
    if not counted:
        findings.note("samples with sample_loss_mask 0 are in no loss, so no token of them counts")
    reward = unnested(record.get("rewards"))
    index = record.get("idx")
    number = index if isinstance(index, int) else line_number
    return compared_columns(ids, sampled, generated, scored_again) | {
        "id": f"{'' if step is None else step}:{number}",
        "step": step,
        "mask": pa.array(sampled & counted),
        "mask_rewritten": not counted,
        "reward": float(reward) if isinstance(reward, int | float) else None,
    }


def recognises(path: Path) -> bool:
    """Whether a file's first line has NeMo-RL's fields."""
    return {"generation_logprobs", "prev_logprobs", "input_lengths"} <= first_object(path).keys()


READER = Reader(
    name="nemo-rl",
    framework="NeMo-RL",
    patterns=("train_data_step*.jsonl",),
    recognises=recognises,
    read=read,
)
