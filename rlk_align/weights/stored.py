"""A tensor in a file of a checkpoint, mapped into memory and read as it is asked for."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rlk_align.errors import CorruptCheckpoint
from rlk_align.model.dtypes import SAFETENSORS_DTYPES

DTYPES = {name: getattr(torch, name) for name in SAFETENSORS_DTYPES.values()}
"""Torch's name -> the dtype, for all dtypes that can be read."""
DAMAGED = "copy or save it again"
"""What to do about a file that is not what its header says."""

Region = tuple[int, int]
"""(start, stop) along the first dimension."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor that one process of a trainer wrote."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a checkpoint's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of it."""
    read: Callable[[Region | None], torch.Tensor]
    """Reads all of it, or the rows of a region. The caller must not write to what it returns."""
    chunks: tuple[Chunk, ...] = ()
    """Empty where the tensor lies in its file in one piece."""


class MappedFile:
    """A file in memory, without reading what nobody asks for."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptCheckpoint where the file cannot be read."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                # A private copy is writable, which torch asks for, and costs nothing until written.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self.data.madvise(mmap.MADV_SEQUENTIAL)
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error}", DAMAGED) from error

    def tensor(self, dtype: str, shape: tuple[int, ...], start: int) -> torch.Tensor:
        """The tensor whose bytes begin at `start`. Raises CorruptCheckpoint where the file ends
        before it does."""
        count = 1
        for size in shape:
            count *= size
        stop = start + count * DTYPES[dtype].itemsize
        if not 0 <= start <= stop <= self.size:
            raise CorruptCheckpoint(
                f"{self.path} is truncated: a tensor ends at byte {stop:,}, and the file has "
                f"{self.size:,}",
                DAMAGED,
            )
        if count == 0:
            return torch.empty(shape, dtype=DTYPES[dtype])
        flat = torch.frombuffer(self.data, dtype=DTYPES[dtype], count=count, offset=start)
        return flat.reshape(shape)
