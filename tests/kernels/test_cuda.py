"""Kernels in CUDA C++: how they are compiled and kept. No GPU is asked; they run in tests/gpu."""

import ctypes
import threading
from ctypes import c_int, c_void_p
from types import SimpleNamespace

import pytest
import torch
from rlk_kernels import ahead, cuda, device, nvrtc, private_api
from rlk_kernels.errors import KernelFailed
from rlk_kernels.launching import ShapeCache, count_launch
from rlk_kernels.nvrtc import Source

GOOD = Source("nothing", 'extern "C" __global__ void nothing() {}', ("--gpu-architecture=sm_90a",))


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """Nothing was compiled before, in this process or another."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "_binaries", {})


def test_a_source_becomes_a_binary():
    binary, said = nvrtc.compile_source(GOOD)
    assert binary.startswith(b"\x7fELF")
    assert said == ""


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"text": "oops"}, "product.cu|nothing.cu"),
        ({"options": ("--no-such-option",)}, "no-such-option"),
    ],
)
def test_what_does_not_compile_says_why(changed, what):
    with pytest.raises(KernelFailed, match=what):
        nvrtc.compile_source(GOOD._replace(**changed))


def test_it_is_compiled_once_and_then_read(monkeypatch):
    compiled, compile_source = [], nvrtc.compile_source

    def counted(source):
        compiled.append(source)
        return compile_source(source)

    monkeypatch.setattr(nvrtc, "compile_source", counted)
    first = cuda.binary(GOOD).result()
    assert cuda.binary(GOOD).result() == first
    cuda._binaries.clear()  # as in another process
    assert cuda.binary(GOOD).result() == first
    assert compiled == [GOOD]
    other = GOOD._replace(options=(*GOOD.options, "-DX=1"))
    cuda.binary(other)
    assert compiled == [GOOD, other]
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    cuda._binaries.clear()
    cuda.binary(GOOD)
    assert compiled == [GOOD, other, GOOD]


def test_ahead_of_a_launch_it_is_compiled_by_a_thread_and_does_not_run(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(ahead, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked = []
    with ahead.compiled_ahead(torch.device("cuda")) as is_ahead:
        assert is_ahead
        cuda.launch(ShapeCache(), GOOD, 1, 128, 0, (), asked.append)
        future = cuda.binary(GOOD)
    assert future.done()
    assert future.result().startswith(b"\x7fELF")
    assert not asked
    assert count_launch()
    assert ahead.submit(len, "at once").result() == 7


def test_a_failure_ahead_is_raised_where_the_kernel_is_needed(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(ahead, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    bad = GOOD._replace(text="oops")
    with ahead.compiled_ahead(torch.device("cuda")):
        cuda.binary(bad)
    with pytest.raises(KernelFailed):
        cuda.binary(bad).result()


def test_what_failed_is_tried_again_and_a_full_disk_is_no_failure(monkeypatch):
    def refused(*_, **__):
        raise OSError("No space left on device")

    compile_source = nvrtc.compile_source
    monkeypatch.setattr(nvrtc, "compile_source", refused)
    with pytest.raises(OSError, match="No space"):
        cuda.binary(GOOD)
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setattr(cache.FileCacheManager, "put", refused)
    assert cuda.binary(GOOD).result().startswith(b"\x7fELF")


@pytest.mark.parametrize(("built_for", "major"), [("13.0", "13"), ("12.8", "12"), (None, "13")])
def test_the_compiler_is_that_of_torchs_cuda(built_for, major, monkeypatch, tmp_path):
    """A driver may refuse what a newer one compiles."""
    for wheel, number in (("cu13", 13), ("cuda_nvrtc", 12)):
        (tmp_path / wheel / "lib").mkdir(parents=True)
        (tmp_path / wheel / "lib" / f"libnvrtc.so.{number}").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    first, *_ = nvrtc._candidates()
    assert first[-1].endswith(f"libnvrtc.so.{major}")


def test_structures_are_those_of_the_headers():
    """cuda.h of CUDA 13.0: CUlaunchAttribute, CUlaunchConfig, CUtensorMap."""
    assert ctypes.sizeof(cuda._LaunchAttribute) == 72
    assert cuda._LaunchAttribute.value.offset == 8
    config = cuda._LaunchConfig
    assert ctypes.sizeof(config) == 56
    assert [getattr(config, x).offset for x in ("block", "shared", "stream", "attributes")] == [
        12, 24, 32, 40,
    ]  # fmt: skip
    assert ctypes.sizeof(cuda.TensorMap) == 128


class Driver:
    """Stands for libcuda: notes what it is given."""

    def __init__(self):
        self.maps = []

    def cuTensorMapEncodeTiled(self, address, *arguments):
        self.maps.append((ctypes.addressof(address._obj), arguments))
        return 0

    def cuGetErrorName(self, error, name):
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0


def test_tensor_maps_lie_as_the_driver_wants_them(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    x = torch.zeros(100, 512, dtype=torch.bfloat16)[:, :256]
    made = [cuda.tensor_map(x, rows) for rows in range(8, 256, 8)]
    assert all(address % 64 == 0 for address, _ in driver.maps)
    assert [ctypes.addressof(x) for x in made] == [address for address, _ in driver.maps]
    _, (kind, rank, address, sizes, strides, box, *_) = driver.maps[3]
    assert (kind, rank, address.value) == (9, 2, x.data_ptr())
    assert (list(sizes), list(strides), list(box)) == ([256, 100], [1024], [64, 32])


class Launching(Driver):
    """A thread without a context at first; notes launches."""

    def __init__(self):
        super().__init__()
        self.context, self.launched, self.entered = 0, [], 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, handle, device):
        handle._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):
        context._obj.value = 1000 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):
        self.context, self.entered = context.value, self.entered + 1
        return 0

    def cuLaunchKernelEx(self, config, function, addresses, extra):
        assert self.context == 1003
        of = config.contents
        launched = [*of.grid, *of.block, of.shared, of.stream, of.count]
        values = [c_int.from_address(address).value for address in addresses]
        attribute = of.attributes.contents
        self.launched.append((launched, (attribute.id, attribute.value), values))
        return 0


def test_a_launch_is_what_was_asked_for(monkeypatch):
    driver, made = Launching(), []
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(cuda, "_thread", threading.local())
    monkeypatch.setattr(cuda, "_arguments", ShapeCache())
    monkeypatch.setattr(cuda, "_function", lambda *of: c_void_p(1))
    monkeypatch.setattr(private_api, "current_device", lambda: 3)
    monkeypatch.setattr(private_api, "current_stream", lambda of: 77)

    def arguments(*numbers):
        made.append(numbers)
        return cuda.Arguments(*map(c_int, numbers))

    first, second = ShapeCache(), ShapeCache()
    for shapes, addresses, numbers in (
        (first, (16, 32), (1, 2)),
        (first, (16, 32), (1, 2)),
        (first, (16, 48), (3, 4)),
        (second, (16, 32), (5, 6)),
    ):
        cuda.launch(shapes, GOOD, 7, 384, 1000, addresses, arguments, *numbers)
    how = [7, 1, 1, 384, 1, 1, 1000, 77, 1]
    overlaps = 6, 1
    assert driver.launched == [(how, overlaps, list(x)) for x in ((1, 2), (1, 2), (3, 4), (5, 6))]
    assert made == [(1, 2), (3, 4), (5, 6)]
    assert driver.entered == 1


def test_an_error_of_the_driver_has_its_name(monkeypatch):
    monkeypatch.setattr(cuda, "_driver", Driver)
    cuda._done(0)
    with pytest.raises(KernelFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        cuda._done(2)


def test_without_the_compiler_other_kernels_run_and_it_is_said(monkeypatch, recwarn):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(device, "capability", lambda of: (9, 0))
    monkeypatch.setattr(device, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([("/nowhere/libnvrtc.so",)]))
    nvrtc.library.cache_clear()
    device.facts.cache_clear()
    try:
        here = device.facts(torch.device("cpu"))
        assert (here.gluon, here.cuda) == (True, False)
        [said] = [x for x in recwarn if x.category is device.HopperKernelsUnused]
        assert "NVRTC" in str(said.message)
        with pytest.raises(KernelFailed, match="NVRTC was not found"):
            nvrtc.compile_source(GOOD)
    finally:
        nvrtc.library.cache_clear()
        device.facts.cache_clear()
