"""Files of torch.save, mapped into memory: tensors are read where they lie."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from rlk_align.errors import CorruptCheckpoint
from rlk_align.weights.lazy import DAMAGED, DTYPES


class MappedFile:
    """A file mapped into memory, so that only what is used is read."""

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

    def entry_start(self, header: int) -> int:
        """Where the bytes of an archive's stored entry begin, whose local header is at `header`:
        30 bytes, then a name and a field whose lengths it ends with."""
        lengths = self.data[header + 26 : header + 30]
        return (
            header
            + 30
            + int.from_bytes(lengths[:2], "little")
            + int.from_bytes(lengths[2:], "little")
        )


def strided(
    flat: torch.Tensor, first: int, sizes: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A view of a storage, as torch.save describes it. Raises ValueError where it ends beyond the
    storage."""
    span = first + sum((n - 1) * s for n, s in zip(sizes, stride, strict=True)) + 1
    if 0 not in sizes and not 0 < span <= len(flat):
        raise ValueError(f"it has {len(flat):,} entries, and its last one would be {span:,}")
    return flat.as_strided(tuple(sizes), tuple(stride), first)
