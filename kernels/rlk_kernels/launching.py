"""Launches kernels without Triton's dispatch, and replays the launches of a repeated call.

At every launch Triton inspects every argument to find the compiled kernel, which takes most of the
host's time of a launch. Here this happens once for calls of one shape, whose `ShapeCache` has the
compiled kernel; tensor maps are cached by address. No bit can change, because the kernel is the one
that Triton would run (`tests/gpu/kernels/test_engine_gpu.py` checks every launch).

`replay_or_run` does more for a call of several kernels: if an earlier call had the same memory and
numbers, it repeats the recorded launches without running the call's own code. RLK_REPLAY=0 in the
environment disables this.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_kernels import private_api
from rlk_kernels.private_api import DirectLauncher, direct_launcher

MOST_VALUES = 512
"""The most values of one name in a `ShapeCache`."""
MOST_REPLAYS = 4096
"""The most recorded calls, of all shapes together."""
MOST_LAUNCHES = 16
"""The most launches of a call that is replayed. With more launches, the GPU is slower than the host
anyway."""


class _Thread(threading.local):
    only_compiles = False
    """Launches compile and do not run (`only_compiling`)."""
    launches = 0
    """The number of launches so far. A recording that lacks a launch is refused."""


_thread = _Thread()


@contextmanager
def only_compiling() -> Iterator[None]:
    """A context in which launches of this thread compile their kernels and run nothing."""
    _thread.only_compiles = True
    try:
        yield
    finally:
        _thread.only_compiles = False


def compiles_only() -> bool:
    """Whether launches of this thread run nothing (`only_compiling`)."""
    return _thread.only_compiles


def count_launch() -> bool:
    """Counts a launch that no recording contains, and returns True. If this thread only compiles,
    counts nothing and returns False."""
    if not _thread.only_compiles:
        _thread.launches += 1
    return not _thread.only_compiles


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel that was compiled and loaded for a launch."""

    kernel: Any
    """`triton.compiler.CompiledKernel`."""
    start: Callable
    """The function that launches the kernel."""
    fixed: tuple
    """The arguments of `start` between the stream and the kernel's arguments."""
    direct: DirectLauncher | None
    """The kernel's launcher without the wrapper; None if this version's launcher is unknown."""
    device: int
    tensors: tuple[int, ...]
    """The indices of arguments that are tensors. All were aligned to 16 bytes, on which the
    compiled kernel relies."""
    maps: tuple[int, ...]
    """The indices of arguments that are tensor maps."""


class ShapeCache:
    """The values that calls of one shape share, which the first call creates."""

    __slots__ = ("compiled", "plan", "proven", "values")

    def __init__(self) -> None:
        self.plan: Any = None
        """The plan of the calls."""
        self.proven: set[Callable] = set()
        """The functions whose kernels access only the call's own memory (`replay_or_run`)."""
        self.compiled: dict[Any, Compiled] = {}
        """The compiled kernels, by the kernel's id and the `part` of `launch`."""
        self.values: dict[str, dict] = {}
        """Other cached values, by name and key."""

    def get_or_create(
        self, name: str, key, make: Callable, *arguments, most: int = MOST_VALUES
    ) -> Any:
        """The value cached for `key` (for example addresses), or a new one by `make(*arguments)`.
        At `most` entries, the values of this name are cleared."""
        by_key = self.values.get(name)
        if by_key is None:
            by_key = self.values[name] = {}
        value = by_key.get(key)
        if value is None:
            if len(by_key) >= most:
                by_key.clear()
            value = by_key[key] = make(*arguments)
        return value


@functools.lru_cache(maxsize=4096)
def shape_cache(*shape) -> ShapeCache:
    """The cache of calls of one `shape`, which consists of everything that determines the kernels'
    arguments, and so the compiled code, except addresses and floating-point numbers."""
    return ShapeCache()


def cdiv(a: int, b: int) -> int:
    """ceil(a / b), in a fraction of the time that `triton.cdiv` takes."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1; see `cdiv`."""
    return 1 << (n - 1).bit_length()


def launch(
    cache: ShapeCache | None, kernel, grid: tuple[int, int, int], arguments: tuple, options: dict,
    part: tuple | None = None,
) -> None:  # fmt: skip
    """`kernel[grid](*arguments, **options)`. cache: that of the call's shape; None for a launch
    that always uses Triton's dispatch. part: distinguishes launches of the kernel with other
    sizes."""
    if _thread.only_compiles:
        private_api.survive_compile_hooks(kernel)
        kernel.warmup(*arguments, grid=grid, **options)
        return
    _thread.launches += 1
    if cache is not None:
        key = id(kernel) if part is None else (id(kernel), part)
        compiled = cache.compiled.get(key)
        if compiled is not None and compiled.device == private_api.current_device():
            addressed = _addressed(compiled.tensors, arguments)
            if addressed is not None:
                if type(cache) is Recording:
                    cache.record(compiled, kernel, grid, arguments, options, addressed)
                else:
                    launch_compiled(compiled, kernel, grid, arguments, options, addressed)
                return
    private_api.survive_compile_hooks(kernel)
    made = kernel[grid](*arguments, **options)
    if cache is None or not hasattr(made, "packed_metadata"):
        return
    tensors = tuple(i for i, x in enumerate(arguments) if isinstance(x, Tensor))
    if _addressed(tensors, arguments) is not None:
        maps = tuple(i for i, x in enumerate(arguments) if hasattr(x, "block_shape"))
        cache.compiled[key] = _compiled(made, torch.cuda.current_device(), tensors, maps)


def _compiled(made, device: int, tensors: tuple[int, ...], maps: tuple[int, ...]) -> Compiled:
    direct = direct_launcher(made)
    start, fixed = made.run, (made.function, made.packed_metadata, None, None, None)
    if direct is not None:
        start, fixed = direct.launch, (
            made.function, direct.cooperative, direct.overlaps, None, None, made.packed_metadata,
            None, None, None,
        )  # fmt: skip
    return Compiled(made, start, fixed, direct, device, tensors, maps)


def _addressed(tensors: tuple[int, ...], arguments: tuple) -> list | None:
    """The arguments with addresses instead of tensors; None if a tensor is not aligned. For a
    tensor Triton's launcher would ask the driver whether it is on the GPU, which operators have
    checked already (`backend.choose`)."""
    addressed, bits = list(arguments), 0
    for i in tensors:
        address = addressed[i] = arguments[i].data_ptr()
        bits |= address
    return None if bits & 15 else addressed


def launch_compiled(
    compiled: Compiled, kernel, grid: tuple[int, int, int], arguments: tuple, options: dict,
    addressed: list,
) -> tuple | None:  # fmt: skip
    """Launches the compiled kernel with the `addressed` arguments, or, under a profiler, by
    Triton's dispatch. Returns (the launching function, its arguments, the object that must stay
    alive), or None for Triton's dispatch."""
    if private_api.profiled():
        kernel[grid](*arguments, **options)
        return None
    if compiled.maps and compiled.direct is not None:
        addressed = compiled.direct.arguments(addressed)
    stream = private_api.current_stream(compiled.device)
    launched = (*grid, stream, *compiled.fixed, *addressed)
    compiled.start(*launched)
    return compiled.start, launched, compiled.kernel


class Recording(ShapeCache):
    """The cache of a shape during one call, with the launches of this call."""

    __slots__ = ("foreign", "known", "memory", "steps")

    def __init__(
        self, cache: ShapeCache, memory: tuple[Tensor | None, ...], addresses: list[int]
    ) -> None:
        """memory: all tensors of the call, at these addresses; () if foreign memory need not be
        looked for."""
        self.plan, self.compiled, self.values = cache.plan, cache.compiled, cache.values
        self.memory, self.known = memory, addresses
        self.steps: list[tuple] = []
        """The result of `launch_compiled` for each launch."""
        self.foreign = False
        """Whether a kernel has accessed other memory. Memory that a call allocates itself may
        belong to another call when the first one is replayed."""

    def record(
        self, compiled: Compiled, kernel, grid: tuple[int, int, int], arguments: tuple,
        options: dict, addressed: list,
    ) -> None:  # fmt: skip
        """`launch_compiled`, recorded."""
        if self.memory:
            self._look_at(compiled, arguments, addressed)
        step = launch_compiled(compiled, kernel, grid, arguments, options, addressed)
        if step is not None:
            self.steps.append(step)

    def _look_at(self, compiled: Compiled, arguments: tuple, addressed: list) -> None:
        """Looks for foreign memory in a launch. addressed: the result of `_addressed`."""
        addresses = [addressed[i] for i in compiled.tensors]
        addresses += [arguments[i].base.data_ptr() for i in compiled.maps]
        self.foreign = self.foreign or not all(map(self._is_known, addresses))

    def _is_known(self, address: int) -> bool:
        if address in self.known or address == 0:  # a tensor without elements
            return True
        storages = (x.untyped_storage() for x in self.memory if x is not None)
        return any(0 <= address - s.data_ptr() < s.nbytes() for s in storages)


_replays: dict[tuple, list[tuple]] = {}


def replay_or_run(
    cache: ShapeCache, memory: tuple[Tensor | None, ...], numbers: tuple,
    run: Callable[..., None], *arguments,
) -> None:  # fmt: skip
    """Calls `run(cache, *arguments)`, which must only launch kernels through its cache, or repeats
    the launches of an earlier call with the same memory and numbers, which saves most of the host's
    time of a call of several kernels.

    memory: all tensors that the kernels read and write, including scratch of `run`. numbers: the
    other values on which the kernels' arguments depend, besides the shape. A recording is rejected
    if it lacks a launch (a launch without the cache, the first launch of a kernel, or one under a
    profiler), or if a kernel accessed memory that is not in `memory`. The latter depends on the
    shape and the alignment: it is checked once for a shape whose memory is aligned, and otherwise
    in each call.
    """
    if not private_api.REPLAY or _thread.only_compiles:
        run(cache, *arguments)
        return
    addresses = [0 if x is None else x.data_ptr() for x in memory]
    device = private_api.current_device()
    key = (cache, run, device, private_api.current_stream(device), *addresses, *numbers)
    steps = _replays.get(key)
    if steps is not None and not private_api.profiled():
        _thread.launches += len(steps)
        for start, launched, _ in steps:
            start(*launched)
        return
    aligned = functools.reduce(operator.or_, addresses) & 15 == 0
    proven = aligned and run in cache.proven
    recording, before = Recording(cache, () if proven else memory, addresses), _thread.launches
    run(recording, *arguments)
    count = _thread.launches - before
    if len(recording.steps) == count and 0 < count <= MOST_LAUNCHES and not recording.foreign:
        if len(_replays) >= MOST_REPLAYS:
            _replays.clear()
        _replays[key] = recording.steps
        if aligned:
            cache.proven.add(run)


class _Memory:
    """The properties of a tensor that a tensor map reads, without a reference to its memory."""

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
    """A descriptor of class `kind` (Triton's or Gluon's) for a tensor at an address."""
    return kind(_Memory(address, dtype), list(shape), list(strides), list(box), *layout)
