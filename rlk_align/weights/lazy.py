"""A tensor of a checkpoint, which is read from its files when it is needed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

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
class LazyTensor:
    """A tensor as a checkpoint's header describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of it."""
    read: Callable[[Region | None], torch.Tensor]
    """Reads all of it, or the rows of a region. The caller must not write to what it returns."""
    chunks: tuple[Chunk, ...] = ()
    """Empty where the tensor lies in its file in one piece."""
