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
from types import ModuleType

import torch

from rlk_kernels.device import HAS_TRITON, interpreting, runs_triton
from rlk_kernels.errors import UnknownBackend, UnsupportedDevice, UnsupportedDtype

BACKENDS = ("triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INSTALL_TRITON = "pip install 'triton>=3.6,<3.10' (Linux)"

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


def record(op: str, implementation: str) -> None:
    """Record that `implementation` executed `op` (called by the operators themselves)."""
    _calls[op, implementation] += 1
    _last[op] = implementation


def two_backends(
    portable: ModuleType, on_triton: Callable[[], ModuleType]
) -> Callable[[str, str], ModuleType]:
    """A function (operator, backend) that records the call and returns the module that runs it:
    `portable`, or the module that `on_triton` returns."""

    def module_of(op: str, backend: str) -> ModuleType:
        _calls[op, backend] += 1  # `record`, without another frame in each call
        _last[op] = backend
        return portable if backend == "torch" else on_triton()

    return module_of


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
