"""Launching a kernel again, past Triton's dispatch.

Triton looks at every argument of every launch to find what it has compiled for such arguments: most
of the host's time of a launch. Here that is asked once for calls of one shape, and what was
compiled is kept; tensor maps are kept by address. Nothing of this can change a bit: what runs is
what Triton would run (`tests/gpu/kernels/test_engine_gpu.py` asks it every time).
"""

import functools
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.device import fits_gluon, triton_version

DIRECT_TRITON = ((3, 6), (3, 7))
"""Versions of Triton whose launcher is called past what wraps it: from the first, below the
second."""
_allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`; on the current GPU as Inductor's code allocates, past torch's dispatch."""
    if (
        _allocate is None
        or device.type != "cuda"
        or not torch.cuda.is_initialized()
        or device.index != torch._C._cuda_getDevice()
    ):
        return torch.empty(shape, dtype=dtype, device=device)
    strides, dense = [], 1
    for size in reversed(shape):
        strides.append(dense)
        dense *= max(size, 1)
    return _allocate(tuple(shape), tuple(strides[::-1]), dtype)


@dataclass(frozen=True, slots=True)
class Direct:
    """Triton's launcher itself. What wraps it encodes every tensor map at every launch; here that
    is kept with the descriptor."""

    launch: Any
    encode: Any
    """(descriptor, metadata) -> what the launcher takes in its place."""
    maps: tuple[tuple[int, str, dict], ...]
    """Of each argument that is a descriptor: which one, how it is encoded, the same as Triton says
    it."""
    cooperative: bool
    overlaps: bool

    def arguments(self, given: tuple) -> list:
        """The launcher's arguments for those of the kernel."""
        found = list(given)
        for index, key, how in reversed(self.maps):
            descriptor = found[index]
            encoded = descriptor.__dict__.setdefault("rlk_encoded", {})
            if key not in encoded:
                encoded[key] = self.encode(descriptor, how)
            found[index : index + 1] = encoded[key]
        return found


def direct_launcher(launcher) -> Direct | None:
    """The launcher of a compiled kernel without its wrapper, where it is made as it is known."""
    if not fits_gluon(triton_version(), DIRECT_TRITON):
        return None
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
            (index, repr(sorted(how.items())), how)
            for index, how in zip(indices, inside["tensordesc_meta"], strict=True)
        )
        launch = inside["launcher"]
    return Direct(launch, encode, maps, launcher.launch_cooperative_grid, launcher.launch_pdl)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as it was compiled and loaded for a launch."""

    kernel: Any
    """`triton.compiler.CompiledKernel`."""
    device: int
    tensors: tuple[int, ...]
    """Which arguments are tensors. All were aligned to 16 bytes, which Triton relies on."""
    direct: Direct | None


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


_only_compiling = False


def only_compile(wanted: bool) -> None:
    """Whether launches compile and do not run, for `ahead.py`."""
    global _only_compiling
    _only_compiling = wanted


def launch(seen: dict, kernel, grid: tuple[int, int, int], *arguments, **options) -> None:
    """`kernel[grid](*arguments, **options)`; `seen`: the `launches` of the call's shape."""
    found = seen.get(id(kernel))
    if (
        found is not None
        and found.device == torch._C._cuda_getDevice()
        and _aligned(found.tensors, arguments)
    ):
        again(found, kernel, grid, arguments, options)
        return
    if _only_compiling:
        kernel.warmup(*arguments, grid=grid, **options)
        return
    compiled = kernel[grid](*arguments, **options)
    tensors = tuple(i for i, x in enumerate(arguments) if isinstance(x, Tensor))
    if hasattr(compiled, "packed_metadata") and _aligned(tensors, arguments):
        direct = direct_launcher(compiled.run)
        seen[id(kernel)] = Compiled(compiled, torch.cuda.current_device(), tensors, direct)


def _aligned(tensors: tuple[int, ...], arguments: tuple) -> bool:
    bits = 0
    for i in tensors:
        bits |= arguments[i].data_ptr()
    return bits & 15 == 0


@functools.cache
def _knobs():
    import triton  # what runs without it may import this file

    return triton.knobs.runtime


def again(found: Compiled, kernel, grid: tuple[int, int, int], arguments, options) -> None:
    """Launch what was compiled; a profiler that wants to know of launches gets an ordinary one."""
    knobs = _knobs()
    if knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls:
        kernel[grid](*arguments, **options)
        return
    own = found.kernel
    stream = torch._C._cuda_getCurrentRawStream(found.device)
    direct = found.direct
    if direct is None:
        own.run(*grid, stream, own.function, own.packed_metadata, None, None, None, *arguments)
        return
    direct.launch(
        *grid, stream, own.function, direct.cooperative, direct.overlaps, None, None,
        own.packed_metadata, None, None, None, *direct.arguments(arguments),
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
