"""Allocates memory for results and scratch without torch's dispatch, which takes the host longer
than a launch."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels import private_api


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; on the current GPU from the same allocator, without torch's dispatch."""
    if device.index != private_api.current_device() or not _allocates(device):
        return torch.empty(shape, dtype=dtype, device=device)
    shape, strides = _dense(shape)
    return private_api.allocate(shape, strides, dtype)


def empties(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """`empty` of each shape, all in one block of memory, which lives as long as one of the tensors.
    Each begins at a multiple of 16 bytes. A custom operator must not return two of them, because
    torch forbids outputs that share memory."""
    together = layout(shapes, dtype)
    return views(empty(together.total, dtype, device), together)


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The layout of tensors in a shared block of memory."""

    total: tuple[int]
    """The number of elements of the block, as a shape."""
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """(shape, strides, first element) of each tensor."""


@functools.lru_cache(maxsize=4096)
def layout(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> MemoryLayout:
    """The layout of dense tensors, each at a multiple of 16 bytes."""
    tensors, total, unit = [], 0, 16 // dtype.itemsize
    for shape in shapes:
        tensors.append((*_dense(shape), total))
        total += -(-math.prod(shape) // unit) * unit
    return MemoryLayout((total,), tuple(tensors))


def views(memory: Tensor, layout: MemoryLayout, count: int | None = None) -> list[Tensor]:
    """The tensors in memory[layout.total], or the first `count` of them."""
    view = private_api.reinterpret if type(memory) is Tensor else torch.as_strided
    return [view(memory, *tensor) for tensor in layout.tensors[:count]]


def _allocates(device: torch.device) -> bool:
    return private_api.allocate is not None and _is_gpu(device) and torch.cuda.is_initialized()


@functools.cache
def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"  # torch creates a new string at each access


@functools.lru_cache(maxsize=4096)
def _dense(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of dense memory."""
    strides, dense = [], 1
    for size in reversed(shape):
        strides.append(dense)
        dense *= max(size, 1)
    return tuple(shape), tuple(strides[::-1])
