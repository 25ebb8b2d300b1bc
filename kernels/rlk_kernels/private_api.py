"""What the host code uses of torch and Triton without their promise, and which fast paths it gives.

No other file of the kernels reaches into private parts of either (`tests/architecture`). A fast
path changes the host's time and no bit: without it, the public function below it does the same.

    part                                         seen working on
    CUDA device, stream, allocator               torch 2.11.0+cu130
    custom operators and their implementations   torch 2.11.0+cu130, 2.13.0+cpu
    transforms, modes and forward mode           torch 2.11.0+cu130, 2.13.0+cpu
    launcher without its wrapper                 Triton 3.6.0
    launch hooks, compiling in threads, cache    Triton 3.6.0, 3.9.0
"""

import functools
import operator
import os
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad

from rlk_kernels.device import HAS_TRITON, fits_gluon, triton_version

DIRECT_TRITON = ((3, 6), (3, 7))
"""Versions of Triton whose launcher is called past its wrapper: the first, up to the second."""
REPLAY = os.environ.get("RLK_REPLAY", "1") != "0"
"""Whether repeated calls are replayed (`launching.replay_or_run`). RLK_REPLAY=0 turns that off; it
is read when this module is imported."""


def _no_gpu(*_: Any) -> int:
    return -1


current_device = getattr(torch._C, "_cuda_getDevice", _no_gpu)
"""() -> the current GPU; -1 where torch is built without CUDA."""
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _no_gpu)
"""(GPU) -> its current stream."""
allocate: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""(shape, strides, dtype) -> a tensor on the current GPU, past torch's dispatch, as Inductor's code
allocates. None where torch does not have it."""
reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)
"""(tensor, shape, strides, first element) -> the same memory; no view for autograd."""
transforms = torch._C._functorch.get_interpreter_stack
"""() -> the transforms of torch.func that run now, or None."""
innermost_transform = torch._C._functorch.peek_interpreter_stack
"""() -> the last of `transforms`, or None."""
gradient_transform = torch._C._functorch.TransformType.Grad
dispatch_modes = torch._C._len_torch_dispatch_stack
"""() -> how many dispatch modes are active."""
implementation = operator.attrgetter("_init_fn")
"""Of a custom operator: the function that was registered."""
qualified_name = operator.attrgetter("_qualname")
"""Of a custom operator, e.g. `rlk::gemm`."""


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def custom_operators(namespace: str) -> dict[str, Any]:
    """Name -> custom operator of a namespace."""
    prefix = f"{namespace}::"
    return {n.removeprefix(prefix): op for n, op in OPDEFS.items() if n.startswith(prefix)}


def compiling_in(threads: Executor) -> AbstractContextManager:
    """While it lasts, `kernel.warmup` has `threads` compile; at its end all is done."""
    from triton.runtime._async_compile import AsyncCompileMode

    return AsyncCompileMode(threads)


def disk_cache(key: str) -> Any:
    """Triton's folder for what was compiled from `key`, a hexadecimal digest: get_file, put."""
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(key)


@functools.cache
def _triton_knobs() -> Any:
    import triton  # what runs without it may import this file

    return triton.knobs.runtime


def profiled() -> bool:
    """Whether a profiler wants to know of Triton's launches."""
    knobs = _triton_knobs()
    return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)


@dataclass(frozen=True, slots=True)
class DirectLauncher:
    """Triton's launcher itself. Its wrapper encodes every tensor map at every launch; here the
    encoded map stays with the descriptor."""

    launch: Any
    encode: Any
    """(descriptor, metadata) -> what the launcher takes in its place."""
    maps: tuple[tuple[int, str, dict], ...]
    """For each argument that is a descriptor, from the last: its index, the attribute that holds
    its encoded form, and the metadata for `encode`."""
    cooperative: bool
    overlaps: bool

    def arguments(self, arguments: list) -> list:
        """The launcher's arguments for those of the kernel, in the same list."""
        for index, attribute, metadata in self.maps:
            descriptor = arguments[index]
            encoded = descriptor.__dict__.get(attribute)
            if encoded is None:
                encoded = self.encode(descriptor, metadata)
                descriptor.__dict__[attribute] = encoded
            arguments[index : index + 1] = encoded
        return arguments


def direct_launcher(kernel: Any) -> DirectLauncher | None:
    """The launcher of a compiled kernel without its wrapper; None where Triton's version, or the
    launcher's form, is not the one that is known here."""
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
            (index, f"as {sorted(metadata.items())}", metadata)
            for index, metadata in reversed(
                list(zip(indices, inside["tensordesc_meta"], strict=True))
            )
        )
        launch = inside["launcher"]
    return DirectLauncher(
        launch, encode, maps, launcher.launch_cooperative_grid, launcher.launch_pdl
    )


def fast_paths() -> dict[str, str]:
    """Fast path -> `on`, or `off` and why."""
    triton, wanted = "not installed", ".".join(map(str, DIRECT_TRITON[0]))
    if HAS_TRITON:
        triton = triton_version()
    direct = HAS_TRITON and fits_gluon(triton, DIRECT_TRITON)
    return {
        "direct launch": "on" if direct else f"off (Triton {wanted} has it; Triton {triton} here)",
        "direct allocation": "on" if allocate else f"off (torch {torch.__version__} has none)",
        "replay": "on" if REPLAY else "off (RLK_REPLAY=0)",
    }
