"""Which backend runs an operator, and which one ran.

Order of choice: the `backend=` argument, then the environment variable `RLK_BACKEND`, then the
device: "triton" on an NVIDIA GPU of compute capability 8.0 or newer for bf16, fp16 and fp32,
"torch" (portable) for everything else. An explicit choice that cannot run raises; it is never
replaced. Every operator call is recorded when it executes, also below `torch.compile`; the replay
of a CUDA graph is not a call and leaves no record.
"""

import functools
import os
from collections import Counter

import torch

from rlk_kernels.errors import UnknownBackend, UnsupportedDevice, UnsupportedDtype

BACKENDS = ("triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_calls: Counter[tuple[str, str]] = Counter()
_last: dict[str, str] = {}


@functools.cache
def overlapping(device: torch.device) -> bool:
    """Whether kernels on `device` start while the one before them ends (Hopper and newer).

    Such a kernel waits for all of its predecessor's memory before it reads or writes anything, so
    what overlaps is the start alone: it changes times and no bit.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def interpreting() -> bool:
    """True where Triton runs in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def choose(op: str, backend: str | None, x: torch.Tensor, *others: torch.Tensor | None) -> str:
    """The backend for `op` on a tensor like `x`; `others` are the operator's further tensors.

    Raises UnsupportedDtype where no backend takes x's dtype, UnsupportedDevice where the tensors
    are on several devices, and UnknownBackend, UnsupportedDevice or UnsupportedDtype when an
    explicit choice (argument or RLK_BACKEND) cannot run.
    """
    if x.dtype not in DTYPES and x.dtype != torch.float64:
        raise UnsupportedDtype(
            f"{op}: bfloat16, float16, float32 and float64 are supported, not {x.dtype}"
        )
    for other in others:
        if other is not None and other.device != x.device:
            raise UnsupportedDevice(
                f"{op}: tensors are on {x.device} and on {other.device}; move them to one device"
            )
    asked = backend or os.environ.get("RLK_BACKEND") or None
    if asked is None:
        return "triton" if x.dtype in DTYPES and _gpu_works(x.device) else "torch"
    if asked not in BACKENDS:
        raise UnknownBackend(f"{op}: backend {asked!r} is unknown; choose from {list(BACKENDS)}")
    if asked == "triton":
        if x.dtype not in DTYPES:
            raise UnsupportedDtype(
                f"{op}: the triton backend takes bfloat16, float16 and float32, not {x.dtype}; "
                "backend='torch' also takes float64"
            )
        if not (interpreting() or _gpu_works(x.device)):
            raise UnsupportedDevice(
                f"{op}: the triton backend needs an NVIDIA GPU of compute capability 8.0 or newer "
                f"(or TRITON_INTERPRET=1), and the tensor is on {x.device}; use backend='torch'"
            )
    return asked


def _gpu_works(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def record(op: str, backend: str) -> None:
    """Note that `op` executed on `backend` (called by the operators themselves)."""
    _calls[op, backend] += 1
    _last[op] = backend


def last_backend(op: str) -> str | None:
    """The backend that ran the newest call of `op`; None where it has not run."""
    return _last.get(op)


def backend_calls() -> dict[tuple[str, str], int]:
    """(operator, backend) -> number of calls since the start or `reset_backend_calls()`."""
    return dict(_calls)


def reset_backend_calls() -> None:
    """Forget which backends ran."""
    _calls.clear()
    _last.clear()
