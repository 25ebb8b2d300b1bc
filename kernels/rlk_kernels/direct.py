"""What launches and allocates without the layers above it: they cost the host more than the call.

Nothing of this can change a bit: the same kernel runs with the same arguments, in memory from the
same allocator.
"""

import functools
import math
import threading
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.device import fits_gluon, triton_version

DIRECT_TRITON = ((3, 6), (3, 7))
"""Versions of Triton whose launcher is called past what wraps it: from the first, below the
second."""
_allocate: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)


class _Thread(threading.local):
    """What launches ask of their thread; by attribute, as a function costs more than the answer."""

    only_compiles = False
    """Launches compile and do not run (`ahead.py`)."""
    steps: list | None = None
    """What was launched since `launching.repeat` began to record; None among them is what cannot be
    launched again so."""


thread = _Thread()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; on the current GPU as Inductor's code allocates, past torch's dispatch."""
    if thread.steps is not None:  # launched again, kernels would write to what is others' by then
        thread.steps.append(None)
    if not _allocates(device):
        return torch.empty(shape, dtype=dtype, device=device)
    return _allocate(*_dense(shape), dtype)


def empties(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """`empty` of each shape, all in one piece of memory, which is there for as long as one of them
    is; each begins at a multiple of 16 bytes. Nothing for a custom operator to return: torch wants
    no two of its outputs in the same memory."""
    own = layout(shapes, dtype)
    return apart(empty(own.total, dtype, device), own)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie that share a piece of memory."""

    total: tuple[int]
    """Elements of all."""
    places: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """(shape, strides, first element) of each."""


@functools.lru_cache(maxsize=4096)
def layout(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Layout:
    """Of dense tensors, each at a multiple of 16 bytes."""
    places, total, unit = [], 0, 16 // dtype.itemsize
    for shape in shapes:
        places.append((*_dense(shape), total))
        total += -(-math.prod(shape) // unit) * unit
    return Layout((total,), tuple(places))


def apart(memory: Tensor, own: Layout, count: int | None = None) -> list[Tensor]:
    """The tensors in memory[own.total], or the first `count`."""
    # as in Inductor's code: no views, for autograd
    lay = _reinterpret if type(memory) is Tensor else torch.as_strided
    return [lay(memory, *place) for place in own.places[:count]]


def _allocates(device: torch.device) -> bool:
    return (
        _allocate is not None
        and _of_gpu(device)
        and torch.cuda.is_initialized()
        and device.index == torch._C._cuda_getDevice()
    )


@functools.cache
def _of_gpu(device: torch.device) -> bool:
    return device.type == "cuda"  # a string that torch makes anew each time


@functools.lru_cache(maxsize=4096)
def _dense(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of dense memory."""
    strides, dense = [], 1
    for size in reversed(shape):
        strides.append(dense)
        dense *= max(size, 1)
    return tuple(shape), tuple(strides[::-1])


@dataclass(frozen=True, slots=True)
class Direct:
    """Triton's launcher itself. What wraps it encodes every tensor map at every launch; here that
    is kept with the descriptor."""

    launch: Any
    encode: Any
    """(descriptor, metadata) -> what the launcher takes in its place."""
    maps: tuple[tuple[int, str, dict], ...]
    """Of each argument that is a descriptor, from the last: which one, where it keeps itself
    encoded, how it is encoded."""
    cooperative: bool
    overlaps: bool

    def arguments(self, given: list) -> list:
        """The launcher's arguments for those of the kernel, in the same list."""
        for index, key, how in self.maps:
            descriptor = given[index]
            encoded = descriptor.__dict__.get(key)
            if encoded is None:
                encoded = descriptor.__dict__[key] = self.encode(descriptor, how)
            given[index : index + 1] = encoded
        return given


def direct_launcher(kernel) -> Direct | None:
    """The launcher of a compiled kernel without its wrapper, where it is made as it is known."""
    if not fits_gluon(triton_version(), DIRECT_TRITON):
        return None
    launcher = kernel.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch, maps, encode = launcher.launch, (), None
    if isinstance(launch, FunctionType):
        names, cells = launch.__code__.co_freevars, launch.__closure__ or ()
        inside = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
        if set(inside) != {"launcher", "tensordesc_indices", "tensordesc_meta"}:
            return None
        if None in inside["tensordesc_meta"]:
            return None
        encode = launch.__globals__["make_tensordesc_arg"]
        indices = sorted(inside["tensordesc_indices"])
        maps = tuple(
            (index, f"as {sorted(how.items())}", how)
            for index, how in reversed(list(zip(indices, inside["tensordesc_meta"], strict=True)))
        )
        launch = inside["launcher"]
    return Direct(launch, encode, maps, launcher.launch_cooperative_grid, launcher.launch_pdl)
