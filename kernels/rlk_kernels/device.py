"""What the device can do. Every query about it is made here, once.

Most kernels written for Hopper are in Gluon, which changes with every Triton: they run with a
Triton in GLUON_TRITON, at least 3.6 and below 3.10. One is in CUDA C++ and needs NVRTC. Otherwise
the kernels in plain Triton run instead, with the same bits at another speed, and a warning says so
once.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from rlk_kernels import nvrtc

GLUON_TRITON = ((3, 6), (3, 10))
"""Versions of Triton that every Gluon kernel compiles with (`scripts/compile_kernels.py`): from the
first, below the second."""
MANY_GROUPS = ((3, 6), (3, 7))
"""Versions of Triton whose ptxas lets the products of more than two groups of warps overlap in a
Gluon kernel; later ones serialize its wgmma."""


def interpreting() -> bool:
    """True where Triton runs in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _finds_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:
        return False


HAS_TRITON = _finds_triton()
"""Whether Triton is installed. It is imported only when one of its kernels is launched."""


def lazy_module(name: str) -> Callable[[], ModuleType]:
    """A function that returns a module which needs Triton: the module is imported at the first
    call."""
    return functools.cache(functools.partial(importlib.import_module, name))


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    if torch.compiler.is_compiling():  # a cache would be looked into, and warned of
        return _ask_capability(device)
    return _asked_capability(device)


def _ask_capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


_asked_capability = functools.cache(_ask_capability)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton could compile for `device`, installed or not."""
    return capability(device) >= (8, 0)


def fits_gluon(version: str, wanted=GLUON_TRITON) -> bool:
    """Whether a Triton of this version is one of GLUON_TRITON, or of another range."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    return wanted[0] <= numbers < wanted[1]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The properties of the device that launches are planned from."""

    interpreted: bool
    """Kernels run in Triton's CPU interpreter."""
    processors: int
    """Streaming multiprocessors."""
    tma: bool
    """The device copies by tensor maps (Hopper and newer)."""
    overlaps: bool
    """A kernel may start while its predecessor ends (Hopper and newer). It waits for all of the
    predecessor's writes before it reads or writes anything, so only the start overlaps: times
    change, bits do not."""
    gluon: bool
    """The kernels in Gluon run: a GPU of the Hopper generation, and a Triton that fits."""
    many_groups: bool = True
    """More than two groups of warps of such a kernel multiply without waiting for each other: with
    MANY_GROUPS."""
    cuda: bool = False
    """The kernels in CUDA C++ run: a GPU of the Hopper generation, and NVRTC (`nvrtc.py`)."""


PLANNED_PROCESSORS = 132
"""How many processors plans assume where there is no GPU (the number of an H200)."""


class HopperKernelsUnused(RuntimeWarning):
    """Warned once: a Hopper GPU runs without the kernels that are written for it."""


def _warn(what: str) -> None:
    warnings.warn(
        f"kernels of rlk_kernels that are written for Hopper {what}: others run in their place, "
        "with the same bits at another speed",
        HopperKernelsUnused,
        stacklevel=3,
    )


@functools.cache
def facts(device: torch.device) -> DeviceFacts:
    """The facts of `device`, asked once."""
    interpreted = interpreting()
    newer = capability(device) >= (9, 0)
    hopper = capability(device)[0] == 9 and not interpreted
    if hopper and not fits_gluon(triton_version()):
        first, beyond = (".".join(map(str, version)) for version in GLUON_TRITON)
        _warn(f"need Triton >= {first} and < {beyond}, and this is {triton_version()}")
    if hopper and not nvrtc.is_available():
        _warn("need NVRTC, which torch's builds for CUDA bring, and it was not found")
    count = PLANNED_PROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceFacts(
        interpreted=interpreted,
        processors=count,
        tma=newer,
        overlaps=newer,
        gluon=hopper and fits_gluon(triton_version()),
        many_groups=hopper and fits_gluon(triton_version(), MANY_GROUPS),
        cuda=hopper and nvrtc.is_available(),
    )


def triton_version() -> str:
    """The version of the installed Triton; read only where Triton kernels are launched."""
    import triton

    return triton.__version__
