"""Chooses the backend of each operator call, and records the implementation that ran.

The choice follows the `backend=` argument, then the environment variable `RLK_BACKEND`, then the
device: "triton" on an NVIDIA GPU of compute capability 8.0 or newer for bf16, fp16 and fp32, and
"torch" (portable) otherwise. Without Triton a GPU gets "torch" too, and a warning says so once. An
explicit choice that cannot run raises; it is never replaced.

Every operator call is recorded when it executes, also in compiled code. The replay of a CUDA graph
is not a call and is not recorded. The recorded implementation is "triton/hopper" if a kernel of the
call was written for Hopper (in Gluon or CUDA C++), "triton", or "torch".
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
    """The backend of a call of `op` on `x` and the operator's other tensors.

    Raises UnsupportedDtype if no backend supports x's dtype; UnsupportedDevice if the tensors are
    on several devices; UnknownBackend, UnsupportedDevice or UnsupportedDtype if an explicit choice
    (argument or RLK_BACKEND) cannot run."""
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
    """Warns once that a GPU gets the portable backend."""
    warnings.warn(
        f"Triton is not installed, so rlk_kernels runs its portable backend on the GPU: it has the "
        f"same guarantees and is slow. To install the kernels: {INSTALL_TRITON}",
        RuntimeWarning,
        stacklevel=4,
    )


def record(op: str, implementation: str) -> None:
    """Records that `implementation` executed `op`. The operators call this."""
    _calls[op, implementation] += 1
    _last[op] = implementation


def two_backends(
    portable: ModuleType, on_triton: Callable[[], ModuleType]
) -> Callable[[str, str], ModuleType]:
    """A function of (operator, backend) that records the call and returns the module that runs it:
    `portable`, or the result of `on_triton`."""

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
    """Clears the records."""
    _calls.clear()
    _last.clear()
