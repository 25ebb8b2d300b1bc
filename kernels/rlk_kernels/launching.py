"""Launching a kernel again, past Triton's dispatch.

Triton looks at every argument of every launch to find what it has compiled for such arguments: most
of the host's time of a launch. Here that is asked once for calls of one shape, and what was
compiled is kept; tensor maps are kept by address. Nothing of this can change a bit: what runs is
what Triton would run (`tests/gpu/kernels/test_engine_gpu.py` asks it every time).
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.direct import Direct, direct_launcher

KEPT = 512
"""Of one name, for calls of one shape."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as it was compiled and loaded for a launch."""

    kernel: Any
    """`triton.compiler.CompiledKernel`."""
    direct: Direct | None
    """Its launcher without what wraps it, where that is known."""
    device: int
    tensors: tuple[int, ...]
    """Which arguments are tensors. All were aligned to 16 bytes, which Triton relies on."""


@functools.lru_cache(maxsize=4096)
def launches(*shape) -> dict:
    """Kept for calls of one `shape`: all that the kernels' arguments follow from, and with it what
    Triton compiles, but addresses and numbers in floating point."""
    return {}


def cdiv(a: int, b: int) -> int:
    """ceil(a / b), in a fraction of the time that `triton.cdiv` takes."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1; see `cdiv`."""
    return 1 << (n - 1).bit_length()


def kept(seen: dict, name: str, key, make: Callable, *arguments, most: int = KEPT) -> Any:
    """`make(*arguments)`, made once for a `key` (addresses, say) of calls of one shape; seen: their
    `launches`. All are forgotten where there are `most`."""
    by_key = seen.get(name)
    if by_key is None:
        by_key = seen[name] = {}
    found = by_key.get(key)
    if found is None:
        if len(by_key) >= most:
            by_key.clear()
        found = by_key[key] = make(*arguments)
    return found


def launch(seen: dict, kernel, grid: tuple[int, int, int], arguments: tuple, options: dict) -> None:
    """`kernel[grid](*arguments, **options)`; `seen`: the `launches` of the call's shape."""
    found = seen.get(id(kernel))
    if found is not None and found.device == torch._C._cuda_getDevice():
        addressed = _addressed(found.tensors, arguments)
        if addressed is not None:
            again(found, kernel, grid, arguments, options, addressed)
            return
    if compiles_only():
        kernel.warmup(*arguments, grid=grid, **options)
        return
    compiled = kernel[grid](*arguments, **options)
    tensors = tuple(i for i, x in enumerate(arguments) if isinstance(x, Tensor))
    if hasattr(compiled, "packed_metadata") and _addressed(tensors, arguments) is not None:
        device = torch.cuda.current_device()
        seen[id(kernel)] = Compiled(compiled, direct_launcher(compiled), device, tensors)


def _addressed(tensors: tuple[int, ...], arguments: tuple) -> list | None:
    """The arguments with addresses in place of the tensors; None where one is not aligned. Of each
    tensor Triton's launcher would ask the driver whether it lies on the GPU; here operators have
    looked at that (`backend.choose`)."""
    found, bits = list(arguments), 0
    for i in tensors:
        address = found[i] = arguments[i].data_ptr()
        bits |= address
    return None if bits & 15 else found


@functools.cache
def _knobs():
    import triton  # what runs without it may import this file

    return triton.knobs.runtime


def again(
    found: Compiled, kernel, grid: tuple[int, int, int], arguments: tuple, options: dict,
    addressed: list,
) -> None:  # fmt: skip
    """Launch what was compiled with what is `addressed`, the arguments; a profiler that wants to
    know of launches gets an ordinary one."""
    knobs = _knobs()
    if knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls:
        kernel[grid](*arguments, **options)
        return
    own, direct = found.kernel, found.direct
    stream = torch._C._cuda_getCurrentRawStream(found.device)
    if direct is None:
        own.run(*grid, stream, own.function, own.packed_metadata, None, None, None, *addressed)
        return
    direct.launch(
        *grid, stream, own.function, direct.cooperative, direct.overlaps, None, None,
        own.packed_metadata, None, None, None, *direct.arguments(addressed),
    )  # fmt: skip


class _Memory:
    """What a tensor map asks of its tensor, without holding the memory."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=8192)
def tensor_map(
    kind, address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    box: tuple[int, ...], *layout,
):  # fmt: skip
    """A descriptor of class `kind` (Triton's or Gluon's) of what lies at an address."""
    return kind(_Memory(address, dtype), list(shape), list(strides), list(box), *layout)


_thread = threading.local()


def only_compile(wanted: bool) -> None:
    """Whether this thread's launches compile and do not run, for `ahead.py`: others go on."""
    _thread.only_compiles = wanted


def compiles_only() -> bool:
    """Whether this thread's do."""
    return getattr(_thread, "only_compiles", False)
