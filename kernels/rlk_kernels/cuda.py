"""Kernels in CUDA C++, which are compiled once (`nvrtc.py`), cached on disk beside Triton's, and
loaded and launched by the driver.

They compute what Triton cannot express: a matrix product whose width is any multiple of 8. The
driver is called through ctypes, like NVRTC; names and numbers are those of CUDA's headers.
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

from rlk_kernels import ahead, nvrtc, private_api
from rlk_kernels.errors import KernelFailed
from rlk_kernels.launching import ShapeCache, count_launch
from rlk_kernels.nvrtc import Source

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_STREAM_CAPTURE_MODE_RELAXED = 2
_TENSOR_MAP_DATA_TYPE = {torch.float16: 6, torch.bfloat16: 9}
_TENSOR_MAP_SWIZZLE_128B = 3
_TENSOR_MAP_L2_PROMOTION_128B = 2


_thread = threading.local()
_arguments = ShapeCache()
"""The cached `Arguments` of all kernels and shapes."""


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
    """The kernel's binary, from the cache on disk or from the compiler."""
    key = repr((source, nvrtc.version())).encode()
    cache, name = private_api.disk_cache(hashlib.sha256(key).hexdigest()), f"{source.entry}.cubin"
    with contextlib.suppress(OSError):  # another process has removed it
        path = cache.get_file(name)
        if path is not None:
            return Path(path).read_bytes()
    image, _ = nvrtc.compile_source(source)
    with contextlib.suppress(OSError):  # a full disk: the next process compiles again
        cache.put(image, name, binary=True)
    return image


_binaries: dict[Source, "Future[bytes]"] = {}


def binary(source: Source) -> "Future[bytes]":
    """The binary, compiled once per process, in `ahead.compiled_ahead` by one of its threads. A
    failed compilation is tried again at the next call."""
    compiled = _binaries.get(source)
    if compiled is None or (compiled.done() and compiled.exception() is not None):
        compiled = _binaries[source] = ahead.submit(_compiled, source)
    return compiled


def _done(error: int) -> None:
    if error:
        name = c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise KernelFailed(f"the CUDA driver: {(name.value or b'').decode() or error}")


def _enter(device: int) -> None:
    """Makes torch's context the current one of this thread, which may not have called CUDA yet."""
    context, handle = c_void_p(), c_int()
    _done(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _done(_driver().cuDeviceGet(ctypes.byref(handle), device))
        _done(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        _done(_driver().cuCtxSetCurrent(context))
    _thread.entered = True


def driver_call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver in torch's context. Raises KernelFailed with its error."""
    if not hasattr(_thread, "entered"):
        _enter(torch.cuda.current_device())
    _done(getattr(_driver(), name)(*arguments))


@functools.cache
def _function(source: Source, device: int, shared: int) -> c_void_p:
    """The kernel, loaded on the current device, which must be `device`. shared: bytes of dynamic
    shared memory of a program. This is allowed while a graph is captured."""
    image, module, function = binary(source).result(), c_void_p(), c_void_p()
    mode = c_int(_STREAM_CAPTURE_MODE_RELAXED)
    _done(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        _done(_driver().cuModuleLoadData(ctypes.byref(module), image))
        _done(_driver().cuModuleGetFunction(ctypes.byref(function), module, source.entry.encode()))
        _done(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, c_int(shared)))
        return function
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _config(programs: int, threads: int, shared: int, stream: int) -> Any:
    """The launch configuration of a kernel that may start while its predecessor ends, and waits for
    the predecessor itself."""
    overlap = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
    return ctypes.pointer(_LaunchConfig(
        (programs, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(overlap), 1
    ))  # fmt: skip


def _loaded(
    source: Source, programs: int, threads: int, shared: int, device: int, stream: int
) -> tuple[c_void_p, Any]:
    """The kernel, loaded, and its launch configuration."""
    return _function(source, device, shared), _config(programs, threads, shared, stream)


def tensor_map(x: Tensor, box_rows: int) -> TensorMap:
    """A map by which TMA copies boxes of `box_rows` x 64 (128 bytes, swizzled) of x[rows, columns],
    whose elements have 16 bits; elements beyond the edges are zeros."""
    (rows, columns), stride = x.shape, x.stride(0) * x.element_size()
    buffer = (c_uint64 * 24)()
    # The driver requires an alignment of 64 bytes.
    encoded = TensorMap.from_buffer(buffer, -ctypes.addressof(buffer) % 64)
    _done(_driver().cuTensorMapEncodeTiled(
        ctypes.byref(encoded), _TENSOR_MAP_DATA_TYPE[x.dtype], 2, c_void_p(x.data_ptr()),
        (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(stride), (c_uint32 * 2)(64, box_rows),
        (c_uint32 * 2)(1, 1), 0, _TENSOR_MAP_SWIZZLE_128B, _TENSOR_MAP_L2_PROMOTION_128B, 0,
    ))  # fmt: skip
    return encoded


class Arguments:
    """A kernel's arguments in the driver's form."""

    __slots__ = ("addresses", "values")

    def __init__(self, *values: Any) -> None:
        """values: tensor maps, and numbers of ctypes."""
        self.values = values
        self.addresses = (c_void_p * len(values))(*map(ctypes.addressof, values))


def launch(
    cache: ShapeCache, source: Source, programs: int, threads: int, shared: int, addresses: tuple,
    make: Callable[..., Arguments], *made_from: Any,
) -> None:  # fmt: skip
    """Runs a kernel on the current device and stream; in `ahead.compiled_ahead` compiles it
    instead. cache: the cache of the call's shape; make(*made_from): creates the arguments, which
    are cached for `addresses`."""
    if not count_launch():
        binary(source)
        return
    device = private_api.current_device()
    if not hasattr(_thread, "entered"):
        _enter(device)
    stream = private_api.current_stream(device)
    function, config = cache.get_or_create(
        "launch", (device, stream), _loaded, source, programs, threads, shared, device, stream
    )
    key = cache, addresses
    arguments = _arguments.get_or_create("arguments", key, make, *made_from, most=8192)
    _done(_driver().cuLaunchKernelEx(config, function, arguments.addresses, None))
