"""Collects rows into the batches of the table."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rlk_align.logs.dumps.table import BATCH_TOKENS, SCHEMA

Row = Mapping[str, Any]
"""Column of `table.SCHEMA` -> value. A list is a pyarrow array of the column's type with a value
for each token. A value that the dump lacks is None or absent."""


def batches(rows: Iterable[Row], most_tokens: int = BATCH_TOKENS) -> Iterator[pa.RecordBatch]:
    """Yields the rows in batches of about this many tokens."""
    waiting: list[Row] = []
    tokens = 0
    for row in rows:
        waiting.append(row)
        tokens += len(row["token_ids"])
        if tokens >= most_tokens:
            yield _batch(waiting)
            waiting, tokens = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(rows: list[Row]) -> pa.RecordBatch:
    columns = []
    for field in SCHEMA:
        values = [row.get(field.name) for row in rows]
        if pa.types.is_list(field.type):
            columns.append(_lists(values, field.type))
        else:
            columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _lists(values: list[Any], kind: pa.DataType) -> pa.ListArray:
    missing = np.array([value is None for value in values])
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    parts = [value for value in values if value is not None]
    flat = pa.concat_arrays(parts) if parts else pa.array([], kind.value_type)
    return pa.ListArray.from_arrays(offsets, flat, type=kind, mask=pa.array(missing))
