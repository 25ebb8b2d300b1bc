"""Memory of a GPU to which other processes write: CUDA IPC memory, which is opened by its handle.

It uses no multicast, and not torch's allocator, which reuses its memory and maps it again.
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
    """The address of `size` zeroed bytes on the current GPU."""
    address = c_void_p()
    driver_call("cuMemAlloc_v2", ctypes.byref(address), c_size_t(size))
    driver_call("cuMemsetD8_v2", address, c_ubyte(0), c_size_t(size))
    driver_call("cuCtxSynchronize")
    return address.value or 0


class _Array:
    """Memory in the form of CUDA's array interface."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": f"<i{dtype.itemsize}", "data": (address, False),
            "version": 3,
        }  # fmt: skip


def zeros(count: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers in memory by `allocate`, which is never freed."""
    address = allocate(count * dtype.itemsize)
    return torch.as_tensor(_Array(address, count, dtype), device=device)


def handle_of(address: int) -> bytes:
    """The handle by which another process of this machine opens the memory."""
    handle = _Handle()
    driver_call("cuIpcGetMemHandle", ctypes.byref(handle), c_void_p(address))
    return bytes(handle)


def opened(handle: bytes) -> int:
    """The address of another process's memory on the current GPU."""
    address = c_void_p()
    driver_call(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle),
        c_uint(_LAZY_ENABLE_PEER_ACCESS),
    )  # fmt: skip
    return address.value or 0


def gpu_name(device: torch.device) -> tuple[str, str]:
    """(machine, UUID of the GPU), which other processes know too."""
    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


def unreachable(device: torch.device, peers: list[tuple[str, str]]) -> str:
    """The reason why `device` cannot store to one of these GPUs and notify it; "" if it can."""
    machine, own = gpu_name(device)
    visible = {gpu_name(torch.device("cuda", i))[1]: i for i in range(torch.cuda.device_count())}
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
