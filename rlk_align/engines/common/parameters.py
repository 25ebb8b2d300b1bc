"""A live parameter, in the checkpoint's layout, and what a trace keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch

from rlk_align.errors import ModelError
from rlk_align.trace.digest import digest_parameter, digest_slices

BLOCK = 1 << 24
"""Entries that are examined at a time."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of a canonical parameter that one rank holds."""

    rank: int
    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LiveParameter:
    """One canonical parameter as an engine computes with it."""

    name: str
    """E.g. `layers.3.k_proj`, `layers.3.k_proj.bias`, `embed`."""
    value: torch.Tensor
    """Whole and un-sharded, in the checkpoint's layout; exact on rank 0."""
    shards: tuple[Shard, ...] = ()
    """Which rank holds which part; empty if each rank holds all of it."""
    replicas: tuple[torch.Tensor, ...] = ()
    """The copies of ranks 1, 2, ... of a parameter that every rank holds whole."""


CASTS = ("bfloat16", "float16")
"""What engines hold a float32 checkpoint in."""


class Cast(TypedDict):
    """A parameter rounded to another dtype."""

    dtype: str
    digest: str
    rows: np.ndarray
    columns: np.ndarray


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A row of weights.parquet."""

    name: str
    shape: list[int]
    dtype: str
    digest: str
    rows: np.ndarray
    columns: np.ndarray
    shards: list[tuple[int, int, int, int]]
    replicas: list[str]
    casts: list[Cast]


def record_parameter(parameter: LiveParameter) -> ParameterRecord:
    """Digests of the whole, of its slices, and of the other ranks' copies.

    Raises ModelError for a parameter with NaN or infinite entries: nothing can be sampled of it.
    """
    value = parameter.value
    wrong = _count_not_finite(value)
    if wrong:
        raise ModelError(
            f"weight {parameter.name}: {wrong:,} of {value.numel():,} entries are NaN or infinite",
            "check the checkpoint and the dtype in which it was saved",
        )
    rows, columns = digest_slices(value)
    return ParameterRecord(
        name=parameter.name,
        shape=list(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        digest=digest_parameter(value),
        rows=rows,
        columns=columns,
        shards=[(s.rank, s.dim, s.start, s.stop) for s in parameter.shards],
        replicas=[digest_parameter(r) for r in parameter.replicas],
        casts=[_cast(value, dtype) for dtype in CASTS] if value.dtype == torch.float32 else [],
    )


def _cast(value: torch.Tensor, dtype: str) -> Cast:
    rounded = value.to(getattr(torch, dtype))
    rows, columns = digest_slices(rounded)
    return Cast(dtype=dtype, digest=digest_parameter(rounded), rows=rows, columns=columns)


def _count_not_finite(value: torch.Tensor) -> int:
    """The number of entries that are NaN or infinite, counted by blocks of rows: counting takes
    eight bytes an entry, and an engine leaves little of a GPU."""
    rows = max(1, BLOCK * len(value) // max(1, value.numel()))
    return sum(int((~_finite(block)).sum()) for block in value.split(rows))


def _finite(block: torch.Tensor) -> torch.Tensor:
    """torch has no `isfinite` of floats of eight bits, which a user's patch may leave."""
    eight_bits = block.is_floating_point() and block.element_size() == 1
    return torch.isfinite(block.float() if eight_bits else block)


def even_shards(dim: int, sizes: Sequence[int]) -> tuple[Shard, ...]:
    """Shards of consecutive ranks, one after another along `dim`."""
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(
        Shard(rank, dim, start, stop)
        for rank, (start, stop) in enumerate(pairwise(ends))
        if stop > start
    )
