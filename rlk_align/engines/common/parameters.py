"""A live parameter in the checkpoint's layout, and its record in a trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch

from rlk_align.errors import ModelError
from rlk_align.trace.digest import digest_parameter, digest_slices

BLOCK = 1 << 24
"""The number of entries that are examined at a time."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice of a canonical parameter that one rank has."""

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
    """The part that each rank has; empty if each rank has the whole parameter."""
    replicas: tuple[torch.Tensor, ...] = ()
    """The copies of ranks 1, 2, ... of a parameter that every rank has whole."""
    derived: str = ""
    """The module that computes with `value`, if that is a copy derived from the parameter; empty if
    the forward reads the parameter itself."""
    held: torch.Tensor | None = None
    """The parameter beside a derived copy with other values; None if it was emptied."""


CASTS = ("bfloat16", "float16")
"""The dtypes to which engines round a float32 checkpoint."""


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
    derived: str
    held: str
    """The digest of the parameter beside a derived copy; empty if there is none."""


def record_parameter(parameter: LiveParameter) -> ParameterRecord:
    """Records the digests of the whole parameter, of its slices, and of the other ranks' copies.

    Raises ModelError for a parameter with NaN or infinite entries: such a model cannot be sampled.
    """
    value = parameter.value
    wrong = count_not_finite(value)
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
        derived=parameter.derived,
        held="" if parameter.held is None else digest_parameter(parameter.held),
    )


def _cast(value: torch.Tensor, dtype: str) -> Cast:
    rounded = value.to(getattr(torch, dtype))
    rows, columns = digest_slices(rounded)
    return Cast(dtype=dtype, digest=digest_parameter(rounded), rows=rows, columns=columns)


def count_not_finite(value: torch.Tensor) -> int:
    """The number of entries that are NaN or infinite, counted in blocks of rows: the count needs
    eight bytes for each entry, and an engine leaves little memory of a GPU free."""
    rows = max(1, BLOCK * len(value) // max(1, value.numel()))
    return sum(int((~_finite(block)).sum()) for block in value.split(rows))


def _finite(block: torch.Tensor) -> torch.Tensor:
    """Which entries are finite; torch's `isfinite` lacks floats of eight bits."""
    eight_bits = block.is_floating_point() and block.element_size() == 1
    return torch.isfinite(block.float() if eight_bits else block)


def even_shards(dim: int, sizes: Sequence[int]) -> tuple[Shard, ...]:
    """The shards of consecutive ranks along `dim`; `sizes`: those of the ranks."""
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(
        Shard(rank, dim, start, stop)
        for rank, (start, stop) in enumerate(pairwise(ends))
        if stop > start
    )
