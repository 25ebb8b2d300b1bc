"""The properties of the device. Each is queried once, in this file.

Most kernels for Hopper are in Gluon, which changes with every Triton; they need a version in
GLUON_TRITON. One kernel is in CUDA C++ and needs NVRTC. Otherwise the kernels in plain Triton run
instead, with the same bits and another speed, and a warning says so once.
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
"""Versions of Triton with which every Gluon kernel compiles (`scripts/compile_kernels.py`): from
the first to below the second."""
MANY_GROUPS = ((3, 6), (3, 7))
"""Versions of Triton with which the products of more than two groups of warps overlap in a Gluon
kernel. With later versions ptxas serializes the kernel's wgmma."""


def interpreting() -> bool:
    """Whether Triton runs in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _finds_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:
        return False


HAS_TRITON = _finds_triton()
"""Whether Triton is installed. Triton is imported when the first kernel is launched."""


def lazy_module(name: str) -> Callable[[], ModuleType]:
    """A function that imports a module at its first call, and returns the module."""
    return functools.cache(functools.partial(importlib.import_module, name))


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    if torch.compiler.is_compiling():  # the compiler would trace into a cache, and warn
        return _ask_capability(device)
    return _asked_capability(device)


def _ask_capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


_asked_capability = functools.cache(_ask_capability)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton, installed or not, supports `device`."""
    return capability(device) >= (8, 0)


def fits_gluon(version: str, wanted=GLUON_TRITON) -> bool:
    """Whether a version of Triton is in a range, by default GLUON_TRITON."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    return wanted[0] <= numbers < wanted[1]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The properties of the device on which the plans of launches depend."""

    interpreted: bool
    """Kernels run in Triton's CPU interpreter."""
    processors: int
    """Streaming multiprocessors."""
    tma: bool
    """The device copies with tensor maps (Hopper and newer)."""
    overlaps: bool
    """A kernel may start while its predecessor ends (Hopper and newer). The kernel waits for all
    writes of its predecessor before it reads or writes, so only the start overlaps: times change,
    and bits do not."""
    gluon: bool
    """The kernels in Gluon run: the GPU is a Hopper, and Triton is in GLUON_TRITON."""
    many_groups: bool = True
    """More than two groups of warps in such a kernel multiply at the same time: Triton is in
    MANY_GROUPS."""
    cuda: bool = False
    """The kernels in CUDA C++ run: the GPU is a Hopper, and NVRTC is available (`nvrtc.py`)."""


PLANNED_PROCESSORS = 132
"""The number of processors that plans assume without a GPU: that of an H200."""


class HopperKernelsUnused(RuntimeWarning):
    """A Hopper GPU runs without the kernels for Hopper. This is warned of once."""


def _warn(what: str) -> None:
    warnings.warn(
        f"rlk_kernels' kernels for Hopper {what}: other kernels run instead, with the same bits at "
        "another speed",
        HopperKernelsUnused,
        stacklevel=3,
    )


@functools.cache
def facts(device: torch.device) -> DeviceFacts:
    """The facts of `device`, cached."""
    interpreted = interpreting()
    newer = capability(device) >= (9, 0)
    hopper = capability(device)[0] == 9 and not interpreted
    if hopper and not fits_gluon(triton_version()):
        first, beyond = (".".join(map(str, version)) for version in GLUON_TRITON)
        _warn(f"need Triton >= {first} and < {beyond}, and this is {triton_version()}")
    if hopper and not nvrtc.is_available():
        _warn("need NVRTC, which torch's builds for CUDA include, and it was not found")
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
    """The version of the installed Triton. This imports Triton."""
    import triton

    return triton.__version__
