"""Kernels written in CUDA C++: compiled once (`nvrtc.py`), kept on disk beside Triton's, loaded and
launched by the driver.

For what Triton cannot say: a matrix product whose width is any multiple of 8. The driver is called
through ctypes, as NVRTC is; names and numbers are those of CUDA's headers.
"""

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from ctypes import c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlk_kernels import ahead, launching, nvrtc
from rlk_kernels.direct import thread
from rlk_kernels.errors import KernelFailed
from rlk_kernels.nvrtc import Source

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_STREAM_CAPTURE_MODE_RELAXED = 2
_TENSOR_MAP_DATA_TYPE = {torch.float16: 6, torch.bfloat16: 9}
_TENSOR_MAP_SWIZZLE_128B = 3
_TENSOR_MAP_L2_PROMOTION_128B = 2


_thread = threading.local()
_given: dict = {}
"""`Arguments` of all kernels."""


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("words", c_uint64 * 16),)


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _compiled(source: Source) -> bytes:
    """From disk, where it was compiled before."""
    from triton.runtime.cache import get_cache_manager

    key = repr((source, nvrtc.version())).encode()
    manager, name = get_cache_manager(hashlib.sha256(key).hexdigest()), f"{source.entry}.cubin"
    with contextlib.suppress(OSError):  # removed meanwhile
        path = manager.get_file(name)
        if path is not None:
            return Path(path).read_bytes()
    found, _ = nvrtc.compile_source(source)
    with contextlib.suppress(OSError):  # a full disk: the next process compiles again
        manager.put(found, name, binary=True)
    return found


_binaries: dict[Source, "Future[bytes]"] = {}


def binary(source: Source) -> "Future[bytes]":
    """Compiled once a process; while `ahead.compiled_ahead` lasts, by one of its threads. What
    failed is tried again."""
    found = _binaries.get(source)
    if found is None or (found.done() and found.exception() is not None):
        found = _binaries[source] = ahead.soon(_compiled, source)
    return found


def _done(error: int) -> None:
    if error:
        name = c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise KernelFailed(f"the CUDA driver: {(name.value or b'').decode() or error}")


def _enter(device: int) -> None:
    """Make torch's context that of this thread, which may not have called CUDA yet."""
    context, handle = c_void_p(), c_int()
    _done(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _done(_driver().cuDeviceGet(ctypes.byref(handle), device))
        _done(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        _done(_driver().cuCtxSetCurrent(context))
    _thread.entered = True


@functools.cache
def _function(source: Source, device: int, shared: int) -> c_void_p:
    """The kernel, loaded on the current device, which is `device`; shared: bytes of dynamic shared
    memory of a program. Allowed while a graph is captured."""
    image, module, found = binary(source).result(), c_void_p(), c_void_p()
    mode = c_int(_STREAM_CAPTURE_MODE_RELAXED)
    _done(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        _done(_driver().cuModuleLoadData(ctypes.byref(module), image))
        _done(_driver().cuModuleGetFunction(ctypes.byref(found), module, source.entry.encode()))
        _done(_driver().cuFuncSetAttribute(found, _MAX_DYNAMIC_SHARED_SIZE_BYTES, c_int(shared)))
        return found
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _config(programs: int, threads: int, shared: int, stream: int) -> Any:
    """Of launches on a stream: each starts while its predecessor ends, and waits for it itself."""
    overlap = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
    return ctypes.pointer(_LaunchConfig(
        (programs, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(overlap), 1
    ))  # fmt: skip


def tensor_map(x: Tensor, box_rows: int) -> TensorMap:
    """A map of x[rows, columns] of 16 bits that TMA copies by `box_rows` x 64 (128 bytes,
    swizzled); zeros beyond its edges."""
    (rows, columns), stride = x.shape, x.stride(0) * x.element_size()
    room = (c_uint64 * 24)()
    # the driver wants it at a multiple of 64 bytes
    found = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    _done(_driver().cuTensorMapEncodeTiled(
        ctypes.byref(found), _TENSOR_MAP_DATA_TYPE[x.dtype], 2, c_void_p(x.data_ptr()),
        (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(stride), (c_uint32 * 2)(64, box_rows),
        (c_uint32 * 2)(1, 1), 0, _TENSOR_MAP_SWIZZLE_128B, _TENSOR_MAP_L2_PROMOTION_128B, 0,
    ))  # fmt: skip
    return found


class Arguments:
    """What a kernel is given, as the driver reads it."""

    __slots__ = ("addresses", "given")

    def __init__(self, *given: Any) -> None:
        """Tensor maps, and numbers of ctypes."""
        self.given = given
        self.addresses = (c_void_p * len(given))(*map(ctypes.addressof, given))


def launch(
    seen: dict, source: Source, programs: int, threads: int, shared: int, addresses: tuple,
    make: Callable[..., Arguments], *made_from: Any,
) -> None:  # fmt: skip
    """Run a kernel on the current device and stream; seen: the `launching.launches` of its shapes.
    `make(*made_from)` is asked once for each `addresses`. While `ahead.compiled_ahead` lasts the
    kernel is compiled and does not run."""
    launching.spoil()
    if thread.only_compiles:
        binary(source)
        return
    device = torch._C._cuda_getDevice()
    if not hasattr(_thread, "entered"):
        _enter(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    function = launching.kept(seen, "function", device, _function, source, device, shared)
    config = launching.kept(seen, "config", stream, _config, programs, threads, shared, stream)
    shapes = seen.setdefault("shapes", object())
    given = launching.kept(_given, "arguments", (shapes, addresses), make, *made_from, most=8192)
    _done(_driver().cuLaunchKernelEx(config, function, given.addresses, None))
