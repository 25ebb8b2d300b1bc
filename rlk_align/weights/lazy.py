"""A tensor of a checkpoint that is read from its files when it is needed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlk_align.model.dtypes import SAFETENSORS_DTYPES

DTYPES = {name: getattr(torch, name) for name in SAFETENSORS_DTYPES.values()}
"""Torch's name -> the dtype, for all supported dtypes."""
DAMAGED = "copy or save it again"
"""The remedy for a file that does not match its header."""

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
    """Torch's name of the dtype."""
    read: Callable[[Region | None], torch.Tensor]
    """Reads all of it, or the rows of a region. The caller must not write to what it returns."""
    chunks: tuple[Chunk, ...] = ()
    """The chunks of the tensor; empty if its file has it in one piece."""
