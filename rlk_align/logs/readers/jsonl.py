"""The neutral file, as JSON Lines and as Parquet: see `rlk_align.logs.dumps.record`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.dumps.record import PER_TOKEN, SCHEMA, SequenceRecord
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.files import first_object, opened, read_lines
from rlk_align.logs.readers.values import WrongValue, response
from rlk_align.progress import Progress
from rlk_align.text import complaint, one_line, printable

PARQUET = ".parquet"
_ROWS = 256
"""The number of Parquet rows that are read at once."""


def read(files: list[Path], findings: Findings, progress: Progress) -> Iterator[Row]:
    """Yields the sequences of each file. Raises DumpError."""
    findings.version = SCHEMA
    seen: set[tuple[object, object]] = set()
    repeated = 0
    for path in sorted(files):
        if path.suffix == PARQUET:
            rows = _parquet_rows(path, findings, progress)
        else:
            rows = read_lines(path, findings, progress, row_of_line)
        for row in rows:
            name = (row["step"], row["id"])
            repeated += name in seen
            seen.add(name)
            yield row
    if repeated:
        findings.note(
            f"{repeated:,} sequences repeat the id and the step of an earlier one: all are kept"
        )


def row_of_line(line: bytes, _number: int = 0) -> Row:
    """Returns the sequence of a line. Raises WrongValue."""
    return _row(partial(SequenceRecord.model_validate_json, line))


def _row(validate: Any) -> Row:
    try:
        record: SequenceRecord = validate()
    except ValidationError as error:
        raise WrongValue(complaint(error)) from error
    total, prompt = len(record.token_ids), record.prompt_length
    row = record.model_dump(exclude={*PER_TOKEN, "schema_id", "token_ids"})
    row |= {"id": str(record.id), "group": None if record.group is None else str(record.group)}
    row["token_ids"] = pa.array(record.token_ids, pa.int64())
    for name in PER_TOKEN:
        value = getattr(record, name)
        if isinstance(value, int):
            value = pa.array(np.full(total, value), pa.int64())
        elif value is not None:
            value = response(_listed(name, value), total, prompt, name)
        row[name] = value
    mask = row["mask"]
    if mask is not None:
        # If the mask covers only the response, the tokens before it are not scored.
        row["mask"] = mask.fill_null(False)
    return row


def _listed(name: str, value: list[Any]) -> pa.Array:
    if name == "mask":
        return pa.array(np.array(value, dtype=bool))
    whole = name in ("position_ids", "rollout_version", "seeds")
    return pa.array(value, pa.int64() if whole else pa.float64())


def _parquet_rows(path: Path, findings: Findings, progress: Progress) -> Iterator[Row]:
    opened(path, findings)
    try:
        file = pq.ParquetFile(path)
        done = 0
        for batch in file.iter_batches(_ROWS):
            for record in batch.to_pylist():
                done += 1
                progress(f"reading {path.name}", done, file.metadata.num_rows)
                present = {k: v for k, v in record.items() if v is not None}
                try:
                    yield _row(partial(SequenceRecord.model_validate, present))
                except WrongValue as error:
                    raise DumpError(f"{path}, row {done}: {error}", "see docs/import.md") from error
    except (pa.ArrowException, OSError) as error:
        raise DumpError(
            f"{path} is not a Parquet file, or is damaged: {printable(one_line(error))}",
            "write it again",
        ) from error


def recognises(path: Path) -> bool:
    """Whether a file is a neutral file."""
    if path.suffix == PARQUET:
        try:
            names = set(pq.read_schema(path).names)
        except (pa.ArrowException, OSError):
            return False
        return {"token_ids", "prompt_length"} <= names
    return first_object(path).get("schema") == SCHEMA


READER = Reader(
    name="jsonl",
    framework=None,
    patterns=("*.jsonl", f"*{PARQUET}"),
    recognises=recognises,
    read=read,
)
