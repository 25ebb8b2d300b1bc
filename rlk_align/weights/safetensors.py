"""The tensors of safetensors files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlk_align.errors import CorruptCheckpoint, ModelError
from rlk_align.model.dtypes import SAFETENSORS_DTYPES
from rlk_align.model.stored import StoredTensor, file_tensors
from rlk_align.weights.lazy import DAMAGED, LazyTensor, Region


def read_safetensors(path: Path) -> list[LazyTensor]:
    """The tensors of one file.

    Raises CorruptCheckpoint for a truncated or other file, and for an unsupported dtype."""
    try:
        tensors = file_tensors(path)
    except ModelError as error:
        raise CorruptCheckpoint(
            f"{path} is truncated, or is not a safetensors file: {error.__cause__}", DAMAGED
        ) from error
    file = safe_open(path, framework="pt")
    return [_lazy(tensor, file) for tensor in tensors]


def _lazy(tensor: StoredTensor, file: Any) -> LazyTensor:
    dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CorruptCheckpoint(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}, which is not supported",
            f"save it in one of {', '.join(SAFETENSORS_DTYPES)}",
        )

    def read(region: Region | None) -> torch.Tensor:
        whole: torch.Tensor = tensor.read(file)
        return whole if region is None else whole[region[0] : region[1]]

    return LazyTensor(tensor.name, tensor.shape, dtype, read)
