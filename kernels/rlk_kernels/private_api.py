"""The private parts of torch and Triton that the host code uses for its fast paths.

No other file of the kernels uses private parts of either (`tests/architecture`). A fast path
changes the host's time and no bit, because a public function does the same. If a later version
lacks a name, the fast paths that need it are off, and `fast_paths` says so.

    part                                         works with
    CUDA device, stream, allocator               torch 2.11.0+cu130
    transforms, modes and forward mode           torch 2.11.0+cu130, 2.13.0+cpu
    launcher without its wrapper                 Triton 3.6.0
    hooks, compiling in threads, cache           Triton 3.6.0, 3.9.0
"""

import functools
import hashlib
import importlib
import os
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.autograd import forward_ad

from rlk_kernels.device import HAS_TRITON, fits_gluon, triton_version

DIRECT_TRITON = ((3, 6), (3, 7))
"""Versions of Triton whose launcher is called without its wrapper: from the first to below the
second."""
REPLAY = os.environ.get("RLK_REPLAY", "1") != "0"
"""Whether repeated calls are replayed (`launching.replay_or_run`). RLK_REPLAY=0 disables this; the
variable is read when this module is imported."""

_MISSING: list[str] = []
"""The private names that this version lacks."""


def _find(path: str) -> Any:
    """The object with a dotted name; None if there is no such name."""
    first, *names = path.split(".")
    value: Any = importlib.import_module(first)
    for name in names:
        value = getattr(value, name, None)
    if value is None:
        _MISSING.append(path)
    return value


def _public_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_initialized() else -1


# () -> the current GPU; (GPU) -> its current stream; -1 if torch is built without CUDA.
current_device: Any = _find("torch._C._cuda_getDevice") or _public_device
current_stream: Any = _find("torch._C._cuda_getCurrentRawStream") or _public_stream
# The allocation of Inductor's code, without torch's dispatch: (shape, strides, dtype) -> a tensor
# on the current GPU; (tensor, shape, strides, first element) -> a tensor in the same memory, which
# is no view for autograd.
allocate: Any = _find("torch._C._dynamo.guards._empty_strided_cuda")
reinterpret: Any = _find("torch._C._dynamo.guards._reinterpret_tensor") or torch.as_strided
# () -> the active transforms of torch.func; () -> the innermost of them, or None.
transforms = _find("torch._C._functorch.get_interpreter_stack") or (lambda: ())
innermost_transform = _find("torch._C._functorch.peek_interpreter_stack")
gradient_transform = _find("torch._C._functorch.TransformType.Grad")
# () -> the number of active dispatch modes.
dispatch_modes = _find("torch._C._len_torch_dispatch_stack")
_find("torch.autograd.forward_ad._current_level")

_NEEDED = {
    "direct dispatch": (
        "torch._C._functorch.get_interpreter_stack",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._functorch.TransformType.Grad",
        "torch._C._len_torch_dispatch_stack",
        "torch.autograd.forward_ad._current_level",
    ),
    "direct allocation": (
        "torch._C._dynamo.guards._empty_strided_cuda",
        "torch._C._dynamo.guards._reinterpret_tensor",
    ),
    "device query": ("torch._C._cuda_getDevice", "torch._C._cuda_getCurrentRawStream"),
}
"""Fast path -> the names of torch that it needs."""


def _state(path: str) -> str:
    """`on`, or `off` with the names that torch lacks."""
    missing = ", ".join(name for name in _NEEDED[path] if name in _MISSING)
    return f"off (torch {torch.__version__}: no {missing})" if missing else "on"


DIRECT_DISPATCH = _state("direct dispatch") == "on"
"""Whether operators may be called without torch's dispatch, for which all active modes and
transforms must be known."""


def process_group(name: str) -> Any:
    """The process group with a name, because a custom operator takes only the name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def store_of(group: Any) -> Any:
    """The store of a process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    level = getattr(forward_ad, "_current_level", None)
    if level is not None:
        return level >= 0
    try:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:  # it is not active
        return False
    return True


def compiling_in(threads: Executor) -> AbstractContextManager:
    """A context in which `kernel.warmup` compiles in `threads`, or at once if Triton does not
    support that. All kernels are compiled at its end."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return nullcontext()
    return AsyncCompileMode(threads)


def stop_submitting() -> None:
    """Makes `kernel.warmup` compile at once again in a context of `compiling_in`. The threads
    compile the kernels that they have, and a launch waits for its own kernel."""
    try:
        from triton.runtime import _async_compile
    except ImportError:
        return
    _async_compile.active_mode.set(None)


_VARIABLES = {"self", "src", "target", "options", "env_vars"}
"""The free variables of the functions that Triton gives to the threads of `compiling_in`."""


def asked_to_compile(compile_kernel: Any) -> tuple[Any, Any, dict[str, Any]] | None:
    """(source, target, options) of the kernel that such a function compiles; None if Triton's cache
    on disk has the kernel, or if this version's function or cache is unknown."""
    names = getattr(getattr(compile_kernel, "__code__", None), "co_freevars", ())
    if set(names) != _VARIABLES:
        return None
    cells = (cell.cell_contents for cell in compile_kernel.__closure__)
    asked = dict(zip(names, cells, strict=True))
    src, target, options = asked["src"], asked["target"], asked["options"]
    try:
        from triton.compiler import get_cache_key, make_backend

        key = get_cache_key(src, make_backend(target), options, asked["env_vars"])
        cache = disk_cache(hashlib.sha256(key.encode()).hexdigest())
        cached = cache.get_group(f"{src.name[:150]}.json")
    except (ImportError, AttributeError, TypeError):
        return None
    return None if cached else (src, target, options.__dict__)


class NoCache:
    """A cache without contents, for a Triton whose folder is unknown: each process compiles."""

    def get_file(self, name: str) -> None:
        """Returns None."""

    def put(self, data: Any, name: str, binary: bool) -> None:
        """Stores nothing."""


def disk_cache(digest: str) -> Any:
    """Triton's cache for a digest, with the methods get_file and put."""
    try:
        from triton.runtime.cache import get_cache_manager
    except ImportError:
        return NoCache()
    return get_cache_manager(digest)


@functools.cache
def _launch_hooks() -> tuple[Any, Any] | None:
    """Triton's hooks before and after each launch; None if this version's hooks are unknown."""
    import triton  # here, because code that runs without Triton imports this file

    knobs = getattr(getattr(triton, "knobs", None), "runtime", None)
    hooks = (getattr(knobs, f"launch_{when}_hook", None) for when in ("enter", "exit"))
    before, after = hooks
    return (before, after) if hasattr(before, "calls") and hasattr(after, "calls") else None


def profiled() -> bool:
    """Whether a profiler has hooked into Triton's launches; True if that is unknown."""
    hooks = _launch_hooks()
    return hooks is None or bool(hooks[0].calls or hooks[1].calls)


def survive_compile_hooks(kernel: Any) -> None:
    """Skips the hooks of a compilation that Triton cannot describe to them. For a hook, such as
    vLLM's monitor, Triton writes the compilation as JSON, and raises TypeError at a layout of
    Gluon."""
    call_hook = getattr(kernel, "_call_hook", None)
    if call_hook is None or "_call_hook" in vars(kernel):
        return

    def call_hook_or_skip(*args: Any, **kwargs: Any) -> Any:
        try:
            return call_hook(*args, **kwargs)
        except TypeError as error:
            if "not JSON serializable" not in str(error):
                raise
            return None

    kernel._call_hook = call_hook_or_skip


@dataclass(frozen=True, slots=True)
class DirectLauncher:
    """Triton's launcher without its wrapper. The wrapper encodes every tensor map at every launch;
    here the descriptor keeps its encoded map."""

    launch: Any
    encode: Any
    """(descriptor, metadata) -> the launcher's arguments for it."""
    maps: tuple[tuple[int, str, dict], ...]
    """(index, attribute with the encoded form, metadata for `encode`) of each argument that is a
    descriptor, from the last to the first."""
    cooperative: bool
    overlaps: bool

    def arguments(self, arguments: list) -> list:
        """Replaces the kernel's arguments by the launcher's, in place."""
        for index, attribute, metadata in self.maps:
            descriptor = arguments[index]
            encoded = descriptor.__dict__.get(attribute)
            if encoded is None:
                encoded = self.encode(descriptor, metadata)
                descriptor.__dict__[attribute] = encoded
            arguments[index : index + 1] = encoded
        return arguments


_LAUNCHER = (
    *("launch", "global_scratch_size", "profile_scratch_size"),
    *("launch_cooperative_grid", "launch_pdl"),
)
"""The attributes of a launcher that are read."""


def direct_launcher(kernel: Any) -> DirectLauncher | None:
    """The launcher of a compiled kernel without its wrapper; None if Triton's version or the
    launcher is unknown."""
    if not fits_gluon(triton_version(), DIRECT_TRITON):
        return None
    launcher = kernel.run
    if not all(hasattr(launcher, name) for name in _LAUNCHER):
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
        encode = launch.__globals__.get("make_tensordesc_arg")
        if encode is None:
            return None
        described = list(
            zip(sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"], strict=True)
        )
        maps = tuple((i, f"as {sorted(meta.items())}", meta) for i, meta in reversed(described))
        launch = inside["launcher"]
    options = launcher.launch_cooperative_grid, launcher.launch_pdl
    return DirectLauncher(launch, encode, maps, *options)


def fast_paths() -> dict[str, str]:
    """Fast path -> `on`, or `off` with the reason."""
    triton = triton_version() if HAS_TRITON else "0.0"
    off = "off (works with Triton {}.{} only)".format(*DIRECT_TRITON[0])
    hidden = HAS_TRITON and _launch_hooks() is None
    unhooked = f"off (Triton {triton} has no triton.knobs.runtime.launch_enter_hook)"
    replay = "on" if REPLAY else "off (RLK_REPLAY=0)"
    return {
        **{path: _state(path) for path in _NEEDED},
        "direct launch": (unhooked if hidden else "on")
        if fits_gluon(triton, DIRECT_TRITON)
        else off,
        "replay": unhooked if hidden and REPLAY else replay,
    }
