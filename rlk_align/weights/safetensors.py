"""Reads safetensors files: the header, and each tensor in place."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlk_align.errors import CorruptCheckpoint
from rlk_align.model.dtypes import SAFETENSORS_DTYPES
from rlk_align.text import one_line
from rlk_align.weights.stored import DAMAGED, DTYPES, MappedFile, Region, StoredTensor

_LONGEST_HEADER = 1 << 28


def read_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of one file.

    Raises CorruptCheckpoint where the file is truncated, is not a safetensors file, or holds a
    dtype that is not read."""
    file = MappedFile(path)
    start, header = _header(file)
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            count = 1
            for size in shape:
                count *= size
            sound = all(type(x) is int and x >= 0 for x in (*shape, first, last))
            sound = sound and last - first == count * DTYPES[dtype].itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(
                f"{path}: the header describes {name} wrongly: {error!r}", DAMAGED
            ) from error
        if not sound:
            raise CorruptCheckpoint(f"{path}: the header describes {name} wrongly", DAMAGED)
        if start + last > file.size:
            raise CorruptCheckpoint(
                f"{path} is truncated: {name} ends at byte {start + last:,}, and the file has "
                f"{file.size:,}",
                DAMAGED,
            )
        read = partial(_read, file, dtype, shape, start + first)
        tensors.append(StoredTensor(name, shape, dtype, read))
    return tensors


def _header(file: MappedFile) -> tuple[int, dict[str, Any]]:
    """(where the tensors begin, what the header says)."""
    length = int.from_bytes(file.data[:8], "little")
    if file.size < 8 or length > min(_LONGEST_HEADER, file.size - 8):
        raise CorruptCheckpoint(
            f"{file.path} is truncated, or is not a safetensors file: its header would have "
            f"{length:,} bytes, and the file has {file.size:,}",
            DAMAGED,
        )
    try:
        header = json.loads(file.data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{file.path}: the header is not JSON: {one_line(error)}", DAMAGED
        ) from error
    if not isinstance(header, dict):
        raise CorruptCheckpoint(f"{file.path}: the header is not a JSON object", DAMAGED)
    return 8 + length, header


def _read(
    file: MappedFile, dtype: str, shape: tuple[int, ...], start: int, region: Region | None
) -> torch.Tensor:
    whole = file.tensor(dtype, shape, start)
    return whole if region is None else whole[region[0] : region[1]]
