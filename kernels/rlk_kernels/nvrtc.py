"""Compiles kernels in CUDA C++ with NVRTC, CUDA's runtime compiler, which torch's builds for CUDA
include. A kernel takes a fraction of a second, and several can be compiled at a time.

NVRTC is called through ctypes, so that torch is the only dependency.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from rlk_kernels.errors import KernelFailed


class Source(NamedTuple):
    """A kernel before it is compiled."""

    entry: str
    """The kernel's name, that of an `extern "C"` function."""
    text: str
    options: tuple[str, ...]
    """The options of NVRTC."""


def _candidates() -> Iterator[tuple[str, ...]]:
    """Yields the paths at which NVRTC may be, each preceded by the libraries that it needs: in an
    NVIDIA wheel, in a library of torch that links it, and on the loader's path. Its version is the
    CUDA that torch was built for, or any without one, because the driver may reject the binaries of
    a newer NVRTC."""
    major = (torch.version.cuda or "[0-9]*").partition(".")[0]
    wheels = importlib.util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations or () if wheels else ():
        for path in sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}")):
            yield *map(str, path.parent.glob("libnvrtc-builtins.so.*[0-9]")), str(path)
    yield (str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"),)
    yield (f"libnvrtc.so.{major}",)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiler's library. Raises KernelFailed if there is none."""
    for paths in _candidates():
        try:
            *_, compiler = map(ctypes.CDLL, paths)
            compiler.nvrtcGetErrorString.restype = c_char_p
            return compiler
        except (OSError, AttributeError):
            continue
    raise KernelFailed("NVRTC was not found; torch's builds for CUDA include it")


def is_available() -> bool:
    """Whether NVRTC can be loaded."""
    try:
        library()
    except KernelFailed:
        return False
    return True


def version() -> tuple[int, int]:
    major, minor = c_int(), c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(source: Source) -> tuple[bytes, str]:
    """(the binary, the compiler's log). Raises KernelFailed."""
    nvrtc, program, size = library(), c_void_p(), ctypes.c_size_t()

    def output(what: str) -> bytes:
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    def log() -> str:
        return output("ProgramLog").decode(errors="replace").strip("\0\n")

    def done(error: int) -> None:
        if error:
            name = nvrtc.nvrtcGetErrorString(error).decode()
            raise KernelFailed(f"{source.entry}: {name}\n{log() if program else ''}")

    text, name = source.text.encode(), f"{source.entry}.cu".encode()
    options = (c_char_p * len(source.options))(*(option.encode() for option in source.options))
    done(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        done(nvrtc.nvrtcCompileProgram(program, len(options), options))
        return output("CUBIN"), log()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
