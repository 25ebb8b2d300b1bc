"""Triton's launcher is called past its wrapper, with the arguments that the wrapper would give."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlk_kernels import direct, launching
from rlk_kernels.direct import Direct, direct_launcher

HOW = [{"swizzle": 3, "block_size": [8, 8]}, {"swizzle": 1, "block_size": [4, 4]}]


class Map:
    """Stands for a tensor's descriptor."""

    def __init__(self, name: str) -> None:
        self.name = name


encoded: list[tuple[str, Any]] = []


def make_tensordesc_arg(descriptor: Map, how: dict[str, Any]) -> list[Any]:
    encoded.append((descriptor.name, how))
    return [f"map of {descriptor.name}", how["swizzle"]]


def wrapped(launcher: Any, tensordesc_indices: set[int], tensordesc_meta: list[Any]) -> Any:
    """As Triton 3.6 wraps one."""

    def inner(*args: Any) -> Any:
        final = list(args[:13])
        number = 0
        for i, arg in enumerate(args[13:]):
            if i in tensordesc_indices:
                final += make_tensordesc_arg(arg, tensordesc_meta[number])
                number += 1
            else:
                final.append(arg)
        return launcher(*final)

    return inner


def a_kernel(launch: Any, scratch: int = 0) -> Any:
    class Kernel:
        run = SimpleNamespace(
            launch=launch, global_scratch_size=scratch, profile_scratch_size=0,
            launch_cooperative_grid=False, launch_pdl=True,
        )  # fmt: skip

    return Kernel()


@pytest.fixture
def triton_36(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "triton_version", lambda: "3.6.0")
    encoded.clear()


@pytest.mark.usefixtures("triton_36")
def test_the_arguments_are_those_of_the_wrapper_and_maps_are_encoded_once() -> None:
    got: list[tuple[Any, ...]] = []
    own = wrapped(lambda *args: got.append(args), {0, 2}, HOW)
    found = direct_launcher(a_kernel(own))
    assert found is not None
    given = (Map("a"), 5, Map("b"), None, 7)
    before = tuple(range(13))
    own(*before, *given)
    encoded.clear()
    for _ in range(3):
        found.launch(*before, *found.arguments(list(given)))
    assert got[1:] == [got[0]] * 3
    assert sorted(name for name, _ in encoded) == ["a", "b"]


@pytest.mark.usefixtures("triton_36")
def test_one_descriptor_in_two_kernels_is_encoded_as_each_wants_it() -> None:
    shared = Map("a")
    found = [
        direct_launcher(a_kernel(wrapped(print, {0}, [how]))).arguments([shared]) for how in HOW
    ]
    assert found == [["map of a", 3], ["map of a", 1]]


@pytest.mark.usefixtures("triton_36")
def test_a_kernel_without_descriptors_is_called_as_it_is() -> None:
    assert direct_launcher(a_kernel(print)) == Direct(print, None, (), False, True)


@pytest.mark.usefixtures("triton_36")
def test_what_is_not_as_it_is_known_is_left_to_triton() -> None:
    def another(*args: Any) -> None:
        return

    assert direct_launcher(a_kernel(another)) is None
    assert direct_launcher(a_kernel(print, scratch=8)) is None
    assert direct_launcher(a_kernel(wrapped(print, {0}, [None]))) is None


class Kernel:
    """Stands for a kernel that Triton has compiled, and for what launches it."""

    def __init__(self) -> None:
        self.triton: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        launcher = a_kernel(partial(self.launch)).run
        self.compiled = SimpleNamespace(packed_metadata=(), function=0, run=launcher)

    def launch(self, *arguments: Any) -> None:
        self.again.append(arguments[13:])

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self.triton.append(arguments)
            return self.compiled

        return run


@pytest.mark.usefixtures("triton_36")
def test_launched_again_are_addresses_of_tensors_aligned_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = Kernel()
    seen: dict[int, Any] = {}
    x, y = torch.zeros(8), torch.zeros(8)
    for given in ((x, None, 3), (y, None, 4), (y[1:], None, 5), (x, None, 6)):
        launching.launch(seen, kernel, (1, 1, 1), given, {})
    assert kernel.again == [(y.data_ptr(), None, 4), (x.data_ptr(), None, 6)]
    assert [arguments[2] for arguments in kernel.triton] == [3, 5]
    assert kernel.triton[1][0].data_ptr() == y.data_ptr() + 4
    assert kernel.triton[0][0] is x


def test_other_versions_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "triton_version", lambda: "3.7.0")
    assert direct_launcher(a_kernel(print)) is None


@pytest.mark.parametrize("shape", [(3, 4), (0,), (2, 0, 5)])
def test_empty_is_torchs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(direct, "_allocate", lambda *args: asked.append(args))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    like = torch.empty(shape, dtype=torch.bfloat16)
    found = direct.empty(like.shape, torch.bfloat16, torch.device("cpu"))
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
    direct.empty(like.shape, torch.bfloat16, torch.device("cuda", 0))
    assert asked == [(tuple(like.shape), like.stride(), torch.bfloat16)]


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is allocated past torch's dispatch, in memory of the CPU."""
    made: list[torch.Tensor] = []

    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(direct, "_allocate", allocate)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64])
def test_several_lie_apart_in_one_piece_of_memory(
    dtype: torch.dtype, gpu_memory: list[torch.Tensor]
) -> None:
    shapes = (3, 5), (0,), (7,), (), (2, 2, 1), (0, 4)
    found = direct.empties(shapes, dtype, torch.device("cuda", 0))
    assert [(x.shape, x.stride(), x.dtype) for x in found] == [
        (x.shape, x.stride(), x.dtype) for x in (torch.empty(s, dtype=dtype) for s in shapes)
    ]
    (memory,) = gpu_memory
    first = memory.data_ptr()
    assert all((x.data_ptr() - first) % 16 == 0 for x in found)
    for i, x in enumerate(found):
        x.fill_(i)
    assert all(bool((x == i).all()) for i, x in enumerate(found))
    assert memory.numel() * memory.element_size() <= sum(
        x.numel() * x.element_size() + 15 for x in found
    )


def test_several_are_changed_in_place_as_any_tensor(gpu_memory: list[torch.Tensor]) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            y, z = direct.empties((x.shape, x.shape), x.dtype, torch.device("cuda", 0))
            return torch.mul(x, 2, out=y), torch.mul(x, 3, out=z)

        @staticmethod
        def backward(ctx: Any, *g: torch.Tensor) -> Any:
            return 2 * g[0] + 3 * g[1]

    x = torch.ones(4, requires_grad=True)
    y, z = Double.apply(x)
    assert not y._is_view()
    y *= 5
    (y + z).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [13.0] * 4
    assert len(gpu_memory) == 1


def test_no_operator_of_torch_may_return_several() -> None:
    @torch.library.custom_op("rlk_test::several", mutates_args=())
    def several(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = direct.empties((x.shape, x.shape), x.dtype, x.device)
        return y, z

    with pytest.raises(RuntimeError, match="may not alias"):
        several(torch.ones(3))


def test_every_operator_is_dispatched_straight_on_gpus() -> None:
    from torch._library.custom_ops import OPDEFS

    names = [name for name in OPDEFS if name.startswith("rlk::")]
    assert len(names) > 10
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in names)
