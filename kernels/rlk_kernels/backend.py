"""Which backend runs an operator, and which one ran.

Order of choice: the `backend=` argument, then the environment variable `RLK_BACKEND`, then the
device: "triton" on an NVIDIA GPU of compute capability 8.0 or newer for bf16, fp16 and fp32,
"torch" (portable) for everything else. Without Triton a GPU gets "torch" too, and a warning says
so once. An explicit choice that cannot run raises; it is never replaced.

Every operator call is recorded when it executes, also below `torch.compile`; the replay of a CUDA
graph is not a call and leaves no record. What is recorded is the implementation that ran:
"triton/hopper" if any kernel of the call was written for Hopper (in Gluon or CUDA C++), "triton",
or "torch".
"""

import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.library import CustomOpDef

from rlk_kernels import private_api
from rlk_kernels.device import HAS_TRITON, interpreting, runs_triton
from rlk_kernels.errors import UnknownBackend, UnsupportedDevice, UnsupportedDtype

BACKENDS = ("triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INSTALL_TRITON = "pip install 'triton>=3.6' (Linux)"

_calls: Counter[tuple[str, str]] = Counter()
_last: dict[str, str] = {}


def choose(op: str, backend: str | None, x: torch.Tensor, *others: torch.Tensor | None) -> str:
    """The backend for `op` on a tensor like `x`; `others` are the operator's further tensors.

    Raises UnsupportedDtype where no backend takes x's dtype, UnsupportedDevice where the tensors
    are on several devices, and UnknownBackend, UnsupportedDevice or UnsupportedDtype when an
    explicit choice (argument or RLK_BACKEND) cannot run.
    """
    dtype, device = x.dtype, x.device
    narrow = dtype in DTYPES
    if not narrow and dtype != torch.float64:
        raise UnsupportedDtype(
            f"{op}: bfloat16, float16, float32 and float64 are supported, not {dtype}"
        )
    for other in others:
        if other is not None and other.device != device:
            raise UnsupportedDevice(
                f"{op}: tensors are on {device} and on {other.device}; move them to one device"
            )
    asked = backend or os.environ.get("RLK_BACKEND")
    if not asked:
        if not narrow or not runs_triton(device):
            return "torch"
        if not HAS_TRITON:
            _warn_of_no_triton()
            return "torch"
        return "triton"
    if asked not in BACKENDS:
        raise UnknownBackend(f"{op}: backend {asked!r} is unknown; choose from {list(BACKENDS)}")
    if asked == "triton":
        if not narrow:
            raise UnsupportedDtype(
                f"{op}: the triton backend takes bfloat16, float16 and float32, not {dtype}; "
                "backend='torch' also takes float64"
            )
        if not HAS_TRITON:
            raise UnsupportedDevice(
                f"{op}: the triton backend needs Triton, and it is not installed: "
                f"{INSTALL_TRITON}; or use backend='torch'"
            )
        if not (interpreting() or runs_triton(device)):
            raise UnsupportedDevice(
                f"{op}: the triton backend needs an NVIDIA GPU of compute capability 8.0 or newer "
                f"(or TRITON_INTERPRET=1), and the tensor is on {device}; use backend='torch'"
            )
    return asked


@functools.cache
def _warn_of_no_triton() -> None:
    """Warn once why a GPU gets the portable backend."""
    warnings.warn(
        f"Triton is not installed, so rlk_kernels runs its portable backend on the GPU: the same "
        f"contract, but slow. To get its kernels: {INSTALL_TRITON}",
        RuntimeWarning,
        stacklevel=4,
    )


def refuse_transforms(op: str, *, vmap: bool = True) -> None:
    """Raise NotImplementedError where torch would differentiate `op` other than by a backward: in
    torch.func.grad, jvp and their derivatives, and in forward mode, where tangents would be zeros.
    `vmap`: whether torch.vmap may take it row by row."""
    stack = private_api.transforms() or ()
    grad = any(x.key() == private_api.gradient_transform for x in stack)
    if grad or private_api.in_forward_mode() or (stack and not vmap):
        raise NotImplementedError(
            f"{op}: transforms of torch.func and forward mode are not supported; take gradients "
            "with torch.autograd (backward, torch.autograd.grad)"
        )


def refuse_gradient(
    op: CustomOpDef, name: str, why: str = "gradients of its gradients are not implemented"
) -> None:
    """Have every backward through `op` raise NotImplementedError: `name`, with the reason `why`."""

    def backward(ctx, *grads):
        raise NotImplementedError(f"{name}: {why}")

    op.register_autograd(backward)


_PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that behave as torch's own."""
_NO_TENSORS = frozenset({bool, int, float, str, type(None), torch.dtype})
"""Types that `isinstance(x, Tensor)` need not be asked of: it takes several times as long."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Makes x's GPU the current one (for a model on several GPUs), as torch's own operators do:
    kernels are launched on the current GPU."""
    if torch.compiler.is_compiling() or not _lies_elsewhere(x):
        return nullcontext()
    return torch.cuda.device(x.get_device())


def _lies_elsewhere(x: Tensor) -> bool:
    index = x.get_device() if type(x) in _PLAIN else -1
    return index >= 0 and index != private_api.current_device() >= 0


def call(op: CustomOpDef, *args, inference: Callable | None = None):
    """`op(*args)`, without torch's dispatch where it has nothing to do: no compiler, mode,
    transform or tensor subclass. Dispatching costs several times what a launch does. Where a
    gradient is needed, autograd is told of op's backward like that of any function. The first
    argument decides the GPU (`on_device_of`); `inference`: runs instead of op's own function where
    no gradient is needed."""
    if torch.compiler.is_compiling():
        return op(*args)
    if _lies_elsewhere(args[0]):
        with on_device_of(args[0]):
            return call(op, *args, inference=inference)
    if not private_api.DIRECT_DISPATCH:
        refuse_transforms(private_api.qualified_name(op))
        return op(*args)
    if private_api.innermost_transform() is not None or private_api.in_forward_mode():
        refuse_transforms(private_api.qualified_name(op))
        return op(*args)
    grad, differentiated = torch.is_grad_enabled(), False
    for x in args:
        kind = type(x)
        if kind in _NO_TENSORS:
            continue
        if kind in _PLAIN:
            differentiated = differentiated or (grad and x.requires_grad)
        elif isinstance(x, Tensor):
            return op(*args)
    if private_api.dispatch_modes() > 0:
        return op(*args)
    if differentiated:
        function = private_api.differentiable(op)
        return op(*args) if function is None else function.apply(*args)
    return (inference or private_api.implementation(op))(*args)


_on_gpus = torch.library.Library("rlk", "FRAGMENT")


_straight: set[str] = set()


def dispatch_straight() -> None:
    """Have torch's dispatch call these operators on GPUs directly, without the wrapper of
    `custom_op`: compiled models go through the dispatch, not through `call`."""
    for name, op in private_api.custom_operators("rlk").items():
        if name not in _straight:
            _on_gpus.impl(name, private_api.implementation(op), "CUDA")
            _straight.add(name)


def record(op: str, implementation: str) -> None:
    """Record that `implementation` executed `op` (called by the operators themselves)."""
    _calls[op, implementation] += 1
    _last[op] = implementation


def last_backend(op: str) -> str | None:
    """The implementation that ran the latest call of `op`; None if it has not run."""
    return _last.get(op)


def backend_calls() -> dict[tuple[str, str], int]:
    """(operator, implementation) -> number of calls since the start or `reset_backend_calls()`."""
    return dict(_calls)


def reset_backend_calls() -> None:
    """Forget which implementations ran."""
    _calls.clear()
    _last.clear()
