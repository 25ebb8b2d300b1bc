"""Launching a kernel again, past Triton's dispatch.

Triton looks at every argument of every launch to find what it has compiled for such arguments: most
of the host's time of a launch. Here that is asked once for calls of one shape, and what was
compiled is kept; tensor maps are kept by address. Nothing of this can change a bit: what runs is
what Triton would run (`tests/gpu/kernels/test_engine_gpu.py` asks it every time).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.direct import Direct, direct_launcher, thread

KEPT = 512
"""Of one name, for calls of one shape."""
SEQUENCES = 4096
"""Of all shapes (`repeat`)."""
STEPS = 16
"""Launches of a sequence that is kept: with more of them the GPU is behind in any case."""


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
    if thread.only_compiles:
        kernel.warmup(*arguments, grid=grid, **options)
        return
    found = seen.get(id(kernel))
    if found is not None and found.device == torch._C._cuda_getDevice():
        addressed = _addressed(found.tensors, arguments)
        if addressed is not None:
            step = again(found, kernel, grid, arguments, options, addressed)
            if thread.steps is not None:
                thread.steps.append(step)
            return
    spoil()
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


_sequences: dict[tuple, list[tuple]] = {}


def repeat(seen: dict, key: tuple, run: Callable[..., None], *arguments) -> None:
    """`run(*arguments)`, which launches kernels with `launch` and does nothing else. Where it was
    run before for this `key`, its kernels are launched again without it: most of the host's time of
    a call that launches several.

    seen: the `launches` of the call's shape; key: all else that arguments of the kernels follow
    from, as addresses and numbers, those of the memory that `run` is given for its own use too.
    """
    spoil()
    place = seen.get("sequences")
    if place is not None and not thread.only_compiles:
        steps = _sequences.get((place, *_here(), key))
        if steps is not None and not _watched():
            for start, given, _ in steps:
                start(*given)
            return
    before, thread.steps = thread.steps, []
    try:
        run(*arguments)
        steps = thread.steps
    finally:
        thread.steps = before
    if not steps or None in steps or len(steps) > STEPS:
        return
    if len(_sequences) >= SEQUENCES:
        _sequences.clear()
    place = seen.setdefault("sequences", object())
    _sequences[(place, *_here(), key)] = steps


def spoil() -> None:
    """What is recorded, if anything, is not to be launched again: something runs that leaves no
    step."""
    if thread.steps is not None:
        thread.steps.append(None)


def _here() -> tuple[int, int]:
    """(current device, its current stream)."""
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def _knobs():
    import triton  # what runs without it may import this file

    return triton.knobs.runtime


def _watched() -> bool:
    """Whether a profiler wants to know of launches."""
    knobs = _knobs()
    return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)


def again(
    found: Compiled, kernel, grid: tuple[int, int, int], arguments: tuple, options: dict,
    addressed: list,
) -> tuple | None:  # fmt: skip
    """Launch what was compiled with what is `addressed`, the arguments; a profiler that wants to
    know of launches gets an ordinary one. (what was called, what it was given, what must live for
    that), None of an ordinary one."""
    if _watched():
        kernel[grid](*arguments, **options)
        return None
    own, direct = found.kernel, found.direct
    stream = torch._C._cuda_getCurrentRawStream(found.device)
    if direct is None:
        given = (*grid, stream, own.function, own.packed_metadata, None, None, None, *addressed)
        own.run(*given)
        return own.run, given, own
    given = (
        *grid, stream, own.function, direct.cooperative, direct.overlaps, None, None,
        own.packed_metadata, None, None, None, *direct.arguments(addressed),
    )  # fmt: skip
    direct.launch(*given)
    return direct.launch, given, own


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
