"""The table of an imported run, `logprobs.parquet`: a row for each sequence.

It is written and read in batches of whole sequences, because a dump may be larger than memory.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlk_align.logs.dumps.record import Sampling
from rlk_align.logs.dumps.sequences import UNKNOWN, Sequences

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "group": pa.string(),
        "step": pa.int64(),
        "prompt_length": pa.int64(),
        "token_ids": pa.list_(pa.int64()),
        "mask": pa.list_(pa.bool_()),
        "rollout_logprobs": pa.list_(pa.float64()),
        "train_logprobs": pa.list_(pa.float64()),
        "rollout_version": pa.list_(pa.int64()),
        "train_version": pa.int64(),
        "position_ids": pa.list_(pa.int64()),
        "pack_index": pa.int64(),
        "cached_tokens": pa.int64(),
        "entropy": pa.list_(pa.float64()),
        "kept_mass": pa.list_(pa.float64()),
        "reward": pa.float64(),
        "mask_rewritten": pa.bool_(),
        "sampling": pa.struct(
            {
                "temperature": pa.float64(),
                "top_p": pa.float64(),
                "top_k": pa.int64(),
                "min_p": pa.float64(),
                "logprobs_mode": pa.string(),
            }
        ),
        "rollout_dtype": pa.string(),
        "train_dtype": pa.string(),
        "sampler": pa.string(),
        "seeds": pa.list_(pa.int64()),
    }
)
"""Every list is as long as `token_ids`, or null if the dump lacks the field. A null in a list is a
value that was not recorded."""
SINCE_FIRST = {"sampler", "seeds"}
"""Columns that runs imported by earlier versions lack."""
BATCH_TOKENS = 1 << 19
"""The tokens of a batch, which takes about 50 MB of memory."""


def write_table(batches: Iterable[pa.RecordBatch], path: Path) -> None:
    """Writes batches of SCHEMA one after another."""
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_table(path: Path) -> Iterator[Sequences]:
    """Yields the table's sequences, a row group at a time."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        for batch in file.read_row_group(group).combine_chunks().to_batches():
            yield sequences_of(batch)


def read_steps(path: Path) -> Iterator[tuple[int, Iterator[Sequences]]]:
    """Yields each training step, in order, with its sequences, in any order of the table."""
    file = pq.ParquetFile(path)
    groups: dict[int, list[int]] = {}
    for group in range(file.num_row_groups):
        steps = file.read_row_group(group, columns=["step"]).column("step").fill_null(UNKNOWN)
        for step in steps.unique().to_pylist():
            groups.setdefault(step, []).append(group)
    for step in sorted(groups):
        yield step, _of_step(file, groups[step], step)


def _of_step(file: pq.ParquetFile, groups: list[int], step: int) -> Iterator[Sequences]:
    for group in groups:
        table = file.read_row_group(group)
        wanted = pa.array(_integers(table.column("step").combine_chunks()) == step)
        for batch in table.filter(wanted).combine_chunks().to_batches():
            yield sequences_of(batch)


def sequences_of(batch: pa.RecordBatch) -> Sequences:
    """Returns a batch of SCHEMA in flat arrays."""
    for name in SINCE_FIRST - {*batch.schema.names}:
        nothing = pa.nulls(len(batch), SCHEMA.field(name).type)
        batch = batch.append_column(name, nothing)
    lengths = np.asarray(batch.column("token_ids").value_lengths(), dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    prompts = _integers(batch.column("prompt_length"))
    tokens = int(offsets[-1])
    position = np.arange(tokens) - np.repeat(offsets[:-1], lengths)
    rollout, rollout_missing = _values(batch, "rollout_logprobs", lengths)
    train, train_missing = _values(batch, "train_logprobs", lengths)
    mask = _spread(batch.column("mask"), lengths, pa.bool_())
    response = position >= np.repeat(prompts, lengths)
    scored = np.asarray(mask.fill_null(False))
    seeds = _spread(batch.column("seeds"), lengths, pa.int64())
    without_mask = np.repeat(np.asarray(batch.column("mask").is_null()), lengths)
    return Sequences(
        ids=batch.column("id").to_pylist(),
        groups=batch.column("group").to_pylist(),
        offsets=offsets,
        prompt_lengths=prompts,
        steps=_integers(batch.column("step")),
        token_ids=np.asarray(batch.column("token_ids").flatten(), dtype=np.int64),
        scored=np.where(without_mask, response, scored),
        rollout=rollout,
        train=train,
        rollout_missing=rollout_missing,
        train_missing=train_missing,
        rollout_versions=_integers(_spread(batch.column("rollout_version"), lengths, pa.int64())),
        train_versions=_integers(batch.column("train_version")),
        position_ids=_integers(_spread(batch.column("position_ids"), lengths, pa.int64())),
        pack_indices=_integers(batch.column("pack_index")),
        cached_tokens=_integers(batch.column("cached_tokens")),
        entropy=_values(batch, "entropy", lengths)[0],
        kept_mass=_values(batch, "kept_mass", lengths)[0],
        rewards=np.asarray(batch.column("reward").fill_null(np.nan), dtype=np.float64),
        mask_rewritten=np.asarray(batch.column("mask_rewritten").fill_null(False)),
        sampling=[Sampling(**(row or {})) for row in batch.column("sampling").to_pylist()],
        rollout_dtypes=batch.column("rollout_dtype").to_pylist(),
        train_dtypes=batch.column("train_dtype").to_pylist(),
        samplers=batch.column("sampler").to_pylist(),
        seeds=_integers(seeds),
        seeds_missing=np.asarray(seeds.is_null()),
    )


def _spread(column: pa.ListArray, lengths: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """A flattened list column, with nulls for the tokens of rows that have no list."""
    if column.null_count == 0:
        return column.flatten()
    if column.null_count == len(column):
        return pa.nulls(int(lengths.sum()), kind)
    parts: list[Any] = []
    for row, length in zip(column, lengths, strict=True):
        parts.append(row.values if row.is_valid else pa.nulls(int(length), kind))
    return pa.concat_arrays(parts) if parts else pa.array([], kind)


def _values(
    batch: pa.RecordBatch, name: str, lengths: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column's values, with NaN for missing ones, and the mask of missing values."""
    flat = _spread(batch.column(name), lengths, pa.float64())
    return np.asarray(flat.fill_null(np.nan), dtype=np.float64), np.asarray(flat.is_null())


def _integers(column: pa.Array) -> NDArray[np.int64]:
    return np.asarray(column.fill_null(UNKNOWN), dtype=np.int64)
