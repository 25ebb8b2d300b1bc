"""Memory of one GPU that other processes write to: CUDA's own (IPC), opened by its handle.

No multicast, and no memory of torch's allocator, which reuses its memory and maps it again.
"""

import ctypes
import socket
from ctypes import c_char, c_int, c_size_t, c_ubyte, c_uint, c_void_p

import torch
from torch import Tensor

from rlk_kernels.cuda import driver_call

_NATIVE_ATOMIC_SUPPORTED = 3
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", c_char * 64),)


def allocate(size: int) -> int:
    """Address of this many zeroed bytes on the current GPU."""
    address = c_void_p()
    driver_call("cuMemAlloc_v2", ctypes.byref(address), c_size_t(size))
    driver_call("cuMemsetD8_v2", address, c_ubyte(0), c_size_t(size))
    driver_call("cuCtxSynchronize")
    return address.value or 0


class _Array:
    """Memory as torch takes it."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": f"<i{dtype.itemsize}", "data": (address, False),
            "version": 3,
        }  # fmt: skip


def zeros(count: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers in memory of `allocate`, which is never freed."""
    address = allocate(count * dtype.itemsize)
    return torch.as_tensor(_Array(address, count, dtype), device=device)


def handle_of(address: int) -> bytes:
    """What another process of this machine opens it by."""
    handle = _Handle()
    driver_call("cuIpcGetMemHandle", ctypes.byref(handle), c_void_p(address))
    return bytes(handle)


def opened(handle: bytes) -> int:
    """Address at which the memory of another process is seen from the current GPU."""
    address = c_void_p()
    driver_call(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle),
        c_uint(_LAZY_ENABLE_PEER_ACCESS),
    )  # fmt: skip
    return address.value or 0


def place(device: torch.device) -> tuple[str, str]:
    """(machine, GPU) by names that other processes know them by."""
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def unreachable(device: torch.device, peers: list[tuple[str, str]]) -> str:
    """Why `device` cannot store to a GPU at one of these places and tell it; "" where it can."""
    machine, own = place(device)
    visible = {place(torch.device("cuda", i))[1]: i for i in range(torch.cuda.device_count())}
    for other, gpu in peers:
        if other != machine:
            return f"a rank is on {other}"
        if gpu not in visible:
            return "a rank's GPU is not visible to this process"
        if gpu != own:
            native = c_int()
            ordinals = c_int(visible[own]), c_int(visible[gpu])
            driver_call(
                "cuDeviceGetP2PAttribute", ctypes.byref(native), _NATIVE_ATOMIC_SUPPORTED, *ordinals
            )
            if not native:
                return "GPUs are not connected by NVLink"
    return ""
