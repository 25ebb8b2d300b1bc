"""The private parts of torch and Triton that the host code uses, and the fast paths they give.

No other file of the kernels uses private parts of either (`tests/architecture`). A fast path
changes the host's time and no bit: without it, the public function does the same. So a name that a
later version lacks turns the fast paths off that need it, and `fast_paths` says which.

    part                                         seen working on
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
"""Versions of Triton whose launcher is called past its wrapper: the first, up to the second."""
REPLAY = os.environ.get("RLK_REPLAY", "1") != "0"
"""Whether repeated calls are replayed (`launching.replay_or_run`). RLK_REPLAY=0 turns that off; it
is read when this module is imported."""

_GONE: list[str] = []
"""Names that were not found where they are known."""


def _find(path: str) -> Any:
    """What a dotted name is; None where there is no such name."""
    first, *names = path.split(".")
    found: Any = importlib.import_module(first)
    for name in names:
        found = getattr(found, name, None)
    if found is None:
        _GONE.append(path)
    return found


def _public_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_initialized() else -1


# () -> the current GPU, (GPU) -> its current stream; -1 where torch is built without CUDA.
current_device: Any = _find("torch._C._cuda_getDevice") or _public_device
current_stream: Any = _find("torch._C._cuda_getCurrentRawStream") or _public_stream
# As Inductor's code allocates, past torch's dispatch: (shape, strides, dtype) -> a tensor on the
# current GPU; (tensor, shape, strides, first element) -> the same memory, and no view for autograd.
allocate: Any = _find("torch._C._dynamo.guards._empty_strided_cuda")
reinterpret: Any = _find("torch._C._dynamo.guards._reinterpret_tensor") or torch.as_strided
# () -> the transforms of torch.func that run now and the innermost of them, or None.
transforms = _find("torch._C._functorch.get_interpreter_stack") or (lambda: ())
innermost_transform = _find("torch._C._functorch.peek_interpreter_stack")
gradient_transform = _find("torch._C._functorch.TransformType.Grad")
# () -> how many dispatch modes are active.
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
    """`on`, or `off` and the names that torch lacks."""
    gone = ", ".join(name for name in _NEEDED[path] if name in _GONE)
    return f"off (torch {torch.__version__}: no {gone})" if gone else "on"


DIRECT_DISPATCH = _state("direct dispatch") == "on"
"""Whether operators may be called past torch's dispatch, which needs to know all that is open."""


def process_group(name: str) -> Any:
    """The process group with a name: a custom operator can be given only the name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def store_of(group: Any) -> Any:
    """The store by which a process group was made."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    level = getattr(forward_ad, "_current_level", None)
    if level is not None:
        return level >= 0
    try:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:  # no level is open
        return False
    return True


def compiling_in(threads: Executor) -> AbstractContextManager:
    """A context in which `kernel.warmup` compiles in `threads`, or at once where Triton cannot do
    that; at its end all is compiled."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:
        return nullcontext()
    return AsyncCompileMode(threads)


def stop_submitting() -> None:
    """Have `kernel.warmup` compile at once again, in a context of `compiling_in` that goes on: its
    threads compile what they were given, and a launch waits for its own kernel."""
    try:
        from triton.runtime import _async_compile
    except ImportError:
        return
    _async_compile.active_mode.set(None)


_ASKED = {"self", "src", "target", "options", "env_vars"}
"""The variables of the functions that Triton gives to the threads of `compiling_in`."""


def asked_to_compile(compile_kernel: Any) -> tuple[Any, Any, dict[str, Any]] | None:
    """Source, target and options of what such a function compiles; None if Triton's cache on disk
    has it, or where the function or the cache is not the one that is known here."""
    names = getattr(getattr(compile_kernel, "__code__", None), "co_freevars", ())
    if set(names) != _ASKED:
        return None
    cells = (cell.cell_contents for cell in compile_kernel.__closure__)
    asked = dict(zip(names, cells, strict=True))
    src, target, options = asked["src"], asked["target"], asked["options"]
    try:
        from triton.compiler import get_cache_key, make_backend

        key = get_cache_key(src, make_backend(target), options, asked["env_vars"])
        cache = disk_cache(hashlib.sha256(key.encode()).hexdigest())
        there = cache.get_group(f"{src.name[:150]}.json")
    except (ImportError, AttributeError, TypeError):
        return None
    return None if there else (src, target, options.__dict__)


class NoCache:
    """Keeps nothing, where Triton's folder cannot be found: each process compiles."""

    def get_file(self, name: str) -> None:
        """Never finds anything."""

    def put(self, data: Any, name: str, binary: bool) -> None:
        """Forgets it."""


def disk_cache(digest: str) -> Any:
    """Triton's folder for what was compiled from the content of a digest: get_file, put."""
    try:
        from triton.runtime.cache import get_cache_manager
    except ImportError:
        return NoCache()
    return get_cache_manager(digest)


@functools.cache
def _launch_hooks() -> tuple[Any, Any] | None:
    """Triton's hooks around each launch; None where they are not where they are known."""
    import triton  # what runs without it may import this file

    knobs = getattr(getattr(triton, "knobs", None), "runtime", None)
    hooks = (getattr(knobs, f"launch_{when}_hook", None) for when in ("enter", "exit"))
    before, after = hooks
    return (before, after) if hasattr(before, "calls") and hasattr(after, "calls") else None


def profiled() -> bool:
    """Whether a profiler has hooked into Triton's launches, or may have: where that cannot be told,
    each launch is an ordinary one."""
    hooks = _launch_hooks()
    return hooks is None or bool(hooks[0].calls or hooks[1].calls)


def survive_compile_hooks(kernel: Any) -> None:
    """For a hook into its compilations, such as vLLM's monitor, Triton writes what it compiles as
    JSON, and raises TypeError at a layout of Gluon. Skips the hook for such a compilation."""
    tell = getattr(kernel, "_call_hook", None)
    if tell is None or "_call_hook" in vars(kernel):
        return

    def tell_or_not(*args: Any, **kwargs: Any) -> Any:
        try:
            return tell(*args, **kwargs)
        except TypeError as error:
            if "not JSON serializable" not in str(error):
                raise
            return None

    kernel._call_hook = tell_or_not


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


_LAUNCHER = (
    *("launch", "global_scratch_size", "profile_scratch_size"),
    *("launch_cooperative_grid", "launch_pdl"),
)
"""What is asked of a launcher."""


def direct_launcher(kernel: Any) -> DirectLauncher | None:
    """The launcher of a compiled kernel without its wrapper; None where Triton's version, or the
    launcher's form, is not the one that is known here."""
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
    """Fast path -> `on`, or `off` and why."""
    triton = triton_version() if HAS_TRITON else "0.0"
    off = "off (seen working on Triton {}.{} alone)".format(*DIRECT_TRITON[0])
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
