"""The private parts of torch and Triton that the host code uses, and the fast paths they give.

No other file of the kernels uses private parts of either (`tests/architecture`). A fast path
changes the host's time and no bit: without it, the public function does the same.

    part                                         seen working on
    CUDA device, stream, allocator               torch 2.11.0+cu130
    custom operators and their implementations   torch 2.11.0+cu130, 2.13.0+cpu
    transforms, modes and forward mode           torch 2.11.0+cu130, 2.13.0+cpu
    launcher without its wrapper                 Triton 3.6.0
    hooks, compiling in threads, cache           Triton 3.6.0, 3.9.0
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

# () -> the current GPU, (GPU) -> its current stream; -1 where torch is built without CUDA.
current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: -1)
# As Inductor's code allocates, past torch's dispatch: (shape, strides, dtype) -> a tensor on the
# current GPU; (tensor, shape, strides, first element) -> the same memory, and no view for autograd.
allocate: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided)
# () -> the transforms of torch.func that run now and the innermost of them, or None.
transforms = torch._C._functorch.get_interpreter_stack
innermost_transform = torch._C._functorch.peek_interpreter_stack
gradient_transform = torch._C._functorch.TransformType.Grad
# () -> how many dispatch modes are active.
dispatch_modes = torch._C._len_torch_dispatch_stack
# Of a custom operator: the function that was registered, and its name.
implementation = operator.attrgetter("_init_fn")
qualified_name = operator.attrgetter("_qualname")


@functools.cache
def differentiable(op: Any) -> type[torch.autograd.Function] | None:
    """A custom operator's function and backward for autograd alone, without the dispatch around
    them; None for one that changes an argument, or has no backward."""
    if op._backward_fn is None or op._opoverload._schema.is_mutable:
        return None

    def forward(ctx, *args):
        result = op._init_fn(*args)
        if op._setup_context_fn is not None:
            op._setup_context_fn(ctx=ctx, inputs=args, output=result)
        return result

    def backward(ctx, *grads):
        return op._backward_fn(ctx, *grads)

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"Differentiable_{op._name}", (torch.autograd.Function,), functions)


def process_group(name: str) -> Any:
    """The process group with a name: a custom operator can be given only the name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def store_of(group: Any) -> Any:
    """The store by which a process group was made."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def custom_operators(namespace: str) -> dict[str, Any]:
    """Name -> custom operator of a namespace."""
    prefix = f"{namespace}::"
    return {n.removeprefix(prefix): op for n, op in OPDEFS.items() if n.startswith(prefix)}


def compiling_in(threads: Executor) -> AbstractContextManager:
    """A context in which `kernel.warmup` compiles in `threads`; at its end all is compiled."""
    from triton.runtime._async_compile import AsyncCompileMode

    return AsyncCompileMode(threads)


def stop_submitting() -> None:
    """Have `kernel.warmup` compile at once again, in a context of `compiling_in` that goes on: its
    threads compile what they were given, and a launch waits for its own kernel."""
    from triton.runtime import _async_compile

    _async_compile.active_mode.set(None)


def disk_cache(digest: str) -> Any:
    """Triton's folder for what was compiled from the content of a digest: get_file, put."""
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(digest)


@functools.cache
def _triton_knobs() -> Any:
    import triton  # what runs without it may import this file

    return triton.knobs.runtime


def profiled() -> bool:
    """Whether a profiler has hooked into Triton's launches."""
    knobs = _triton_knobs()
    return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)


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
    return {
        "direct launch": "on" if fits_gluon(triton, DIRECT_TRITON) else off,
        "direct allocation": "on" if allocate else f"off (torch {torch.__version__} has none)",
        "replay": "on" if REPLAY else "off (RLK_REPLAY=0)",
    }
