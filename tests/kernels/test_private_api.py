"""Triton's launcher is called past its wrapper, with the arguments that the wrapper would give."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlk_kernels import private_api
from rlk_kernels.private_api import DirectLauncher, direct_launcher

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
    monkeypatch.setattr(private_api, "triton_version", lambda: "3.6.0")
    encoded.clear()


@pytest.mark.usefixtures("triton_36")
def test_the_arguments_are_those_of_the_wrapper_and_maps_are_encoded_once() -> None:
    got: list[tuple[Any, ...]] = []
    wrapper = wrapped(lambda *args: got.append(args), {0, 2}, HOW)
    launcher = direct_launcher(a_kernel(wrapper))
    assert launcher is not None
    arguments = (Map("a"), 5, Map("b"), None, 7)
    before = tuple(range(13))
    wrapper(*before, *arguments)
    encoded.clear()
    for _ in range(3):
        launcher.launch(*before, *launcher.arguments(list(arguments)))
    assert got[1:] == [got[0]] * 3
    assert sorted(name for name, _ in encoded) == ["a", "b"]


@pytest.mark.usefixtures("triton_36")
def test_one_descriptor_in_two_kernels_is_encoded_as_each_wants_it() -> None:
    shared = Map("a")
    launchers = [
        direct_launcher(a_kernel(wrapped(print, {0}, [how]))).arguments([shared]) for how in HOW
    ]
    assert launchers == [["map of a", 3], ["map of a", 1]]


@pytest.mark.usefixtures("triton_36")
def test_a_kernel_without_descriptors_is_called_as_it_is() -> None:
    assert direct_launcher(a_kernel(print)) == DirectLauncher(print, None, (), False, True)


@pytest.mark.usefixtures("triton_36")
def test_what_is_not_as_it_is_known_is_left_to_triton() -> None:
    def another(*args: Any) -> None:
        return

    assert direct_launcher(a_kernel(another)) is None
    assert direct_launcher(a_kernel(print, scratch=8)) is None
    assert direct_launcher(a_kernel(wrapped(print, {0}, [None]))) is None
    assert direct_launcher(SimpleNamespace(run=SimpleNamespace())) is None


def test_other_versions_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_api, "triton_version", lambda: "3.7.0")
    assert direct_launcher(a_kernel(print)) is None


def test_every_operator_is_dispatched_straight_on_gpus() -> None:
    from torch._library.custom_ops import OPDEFS

    names = [name for name in OPDEFS if name.startswith("rlk::")]
    assert len(names) > 10
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in names)


def test_a_compilation_that_a_hook_cannot_be_told_of_goes_on() -> None:
    """vLLM hooks into Triton's compilations; Triton describes them as JSON, without Gluon's
    layouts."""
    pytest.importorskip("triton.experimental.gluon")
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def kernel(x, layout: gl.constexpr):
        pass

    told = []
    layout = gl.BlockedLayout([1], [32], [4], [0])
    options = SimpleNamespace(
        num_warps=4, num_ctas=1, num_stages=1, enable_fp_fusion=True,
        launch_cooperative_grid=False, extern_libs=(),
    )  # fmt: skip
    parameters = inspect.signature(kernel._call_hook).parameters

    def compiled(constant: Any, hook: Any) -> Any:
        given = {
            "hook": hook, "key": ((), []), "signature": {}, "device": 0, "options": options,
            "constants": {(1,): constant}, "configs": [{}], "is_warmup": False,
            "target": SimpleNamespace(),
        }  # fmt: skip
        return kernel._call_hook(**{k: v for k, v in given.items() if k in parameters})

    def hook(**what: Any) -> None:
        told.append(what["fn"].name)

    with pytest.raises(TypeError, match="not JSON serializable"):
        compiled(layout, hook)
    private_api.survive_compile_hooks(kernel)
    private_api.survive_compile_hooks(kernel)
    assert compiled(layout, hook) is None
    assert told == []
    compiled(7, hook)
    assert len(told) == 1

    def broken(**_: Any) -> None:
        raise TypeError("the hook's own")

    with pytest.raises(TypeError, match="the hook's own"):
        compiled(7, broken)
