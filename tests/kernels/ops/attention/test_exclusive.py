"""Which kernel makes the gradients of keys: Hopper's where no other process can use the GPU."""

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace

import planning
import pytest
import torch
from rlk_kernels import device
from rlk_kernels.ops.attention import backward
from rlk_kernels.ops.attention.call import AttentionCall

EXCLUSIVE_PROCESS = 3


class Driver:
    """What libcuda says of a device's compute mode."""

    def __init__(self, mode: int, failing: str = "") -> None:
        self.mode, self.failing = mode, failing

    def cuDeviceGet(self, handle, index: int) -> int:
        handle._obj.value = 70 + index
        return int(self.failing == "device")

    def cuDeviceGetAttribute(self, value, attribute: int, handle) -> int:
        assert (attribute, handle.value) == (20, 71)
        value._obj.value = self.mode
        return int(self.failing == "attribute")


@pytest.mark.parametrize(
    ("mode", "failing", "expected"),
    [(0, "", False), (2, "", False), (EXCLUSIVE_PROCESS, "", True),
     (EXCLUSIVE_PROCESS, "device", False), (EXCLUSIVE_PROCESS, "attribute", False)],
)  # fmt: skip
def test_the_compute_mode_says_whether_a_gpu_is_exclusive(mode, failing, expected, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(mode, failing))
    assert device._is_exclusive(torch.device("cuda", 1)) is expected


def test_without_a_driver_a_gpu_is_not_exclusive(monkeypatch):
    def missing(name: str):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not device._is_exclusive(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("exclusive", "special", "expected"),
    [
        (False, None, "triton"),
        (True, None, "hopper"),
        (False, True, "hopper"),
        (True, False, "triton"),
    ],
)
def test_keys_gradients_are_hoppers_on_an_exclusive_gpu_alone(
    exclusive, special, expected, monkeypatch
):
    """With the launches left out; `special` is what tests and benchmarks ask for."""
    ran = []
    here = replace(planning.H200, exclusive=exclusive)
    monkeypatch.setattr(backward, "facts", lambda of: here)
    monkeypatch.setattr(backward, "_special", lambda *_: True)
    monkeypatch.setattr(backward, "launch", lambda cache, kernel, *_: ran.append(kernel))
    for name, function in (("hopper_dq", "queries_gradient"), ("hopper_dkv", "keys_gradients")):
        module = SimpleNamespace(**{function: lambda *_, name=name: ran.append(name)})
        monkeypatch.setitem(sys.modules, f"rlk_kernels.ops.attention.{name}", module)
    q, k = torch.zeros(4, 2, 128), torch.zeros(4, 1, 128)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    call = AttentionCall(q, k, k, cu, cu, None, True, 1.0, None, out=q)
    *_, said = backward.backward(call, torch.zeros(2, 4), q, special)
    keys = "hopper_dkv" if expected == "hopper" else backward._dkv_kernel
    queries = backward._dq_kernel if special is False else "hopper_dq"
    assert ran == [backward._prepare_kernel, queries, keys]
    assert said == ("triton" if special is False else "triton/hopper")
