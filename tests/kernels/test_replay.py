"""Launches of a call that are replayed without the call's own code, and those that are not."""

import importlib.util
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rlk_kernels import cuda, launching, private_api
from rlk_kernels.cuda import Arguments
from rlk_kernels.launching import ShapeCache
from rlk_kernels.nvrtc import Source

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("here")


class Kernel:
    """Stands for a kernel that Triton has compiled."""

    def __init__(self) -> None:
        self.ordinary: list[tuple[Any, ...]] = []
        self.relaunched: list[tuple[Any, ...]] = []
        run = SimpleNamespace(
            launch=self._launch, global_scratch_size=0, profile_scratch_size=0,
            launch_cooperative_grid=False, launch_pdl=True,
        )  # fmt: skip
        self._compiled = SimpleNamespace(packed_metadata=(), function=7, run=run)

    def _launch(self, *arguments: Any) -> None:
        self.relaunched.append((arguments[3], *arguments[13:]))

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self.ordinary.append(arguments)
            return self._compiled

        return run

    def warmup(self, *arguments: Any, **options: Any) -> None:
        return


class Call:
    """An operator that launches two kernels."""

    def __init__(self) -> None:
        self.first, self.second = Kernel(), Kernel()
        self.cache = ShapeCache()
        self.runs = 0

    def run(self, cache: ShapeCache, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        self.runs += 1
        launching.launch(cache, self.first, (1, 1, 1), (x, y), {})
        launching.launch(cache, self.second, (2, 1, 1), (y, scale), {})

    def __call__(self, x: torch.Tensor, y: torch.Tensor, scale: float = 0.5) -> None:
        launching.replay_or_run(self.cache, (x, y), (scale,), self.run, x, y, scale)

    @property
    def launched(self) -> list[tuple[Any, ...]]:
        return [*self.first.relaunched, *self.second.relaunched]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that is not there: its number and its stream."""
    gpu = SimpleNamespace(device=0, stream=5)
    monkeypatch.setattr(private_api, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(private_api, "current_device", lambda: gpu.device)
    monkeypatch.setattr(private_api, "current_stream", lambda device: gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.device)
    monkeypatch.setattr(launching, "_replays", {})
    return gpu


X, Y, Z = torch.zeros(8), torch.zeros(8), torch.zeros(8)


def recorded() -> Call:
    call = Call()
    for _ in range(2):  # compiled, then recorded
        call(X, Y)
    assert call.runs == 2
    return call


def test_the_same_is_launched_without_the_call_s_code() -> None:
    call = recorded()
    for _ in range(3):
        call(X, Y)
    assert call.runs == 2
    assert call.first.relaunched == [(5, X.data_ptr(), Y.data_ptr())] * 4
    assert call.second.relaunched == [(5, Y.data_ptr(), 0.5)] * 4
    assert len(call.first.ordinary) == len(call.second.ordinary) == 1


def test_other_memory_and_other_numbers_are_a_call_s_own() -> None:
    call = recorded()
    call(X, Z)
    call(X, Y, 0.25)
    assert call.runs == 4
    assert call.first.relaunched[-2:] == [(5, X.data_ptr(), Z.data_ptr()), call.first.relaunched[0]]
    assert [scale for *_, scale in call.second.relaunched[-2:]] == [0.5, 0.25]


@pytest.mark.parametrize("what", ["stream", "device"])
def test_another_stream_or_gpu_is_launched_on(here: SimpleNamespace, what: str) -> None:
    call = recorded()
    setattr(here, what, 9)
    call(X, Y)
    assert call.runs == 3
    assert call.launched[-1][0] == (9 if what == "stream" else 5)


def test_two_shapes_share_nothing() -> None:
    one, other = recorded(), recorded()
    other(X, Y)
    assert (len(one.launched), len(other.launched)) == (2, 4)


def _repeats(cache: ShapeCache) -> None:
    inside = Call()
    for _ in range(3):
        inside(X, Y)


def _launches_ordinarily(cache: ShapeCache) -> None:
    launching.launch(cache, Kernel(), (1, 1, 1), (X,), {})


OTHER, KERNEL = ShapeCache(), Kernel()


def _launches_by_another_cache(cache: ShapeCache) -> None:
    launching.launch(OTHER, KERNEL, (1, 1, 1), (X,), {})


def _launches_in_cuda(cache: ShapeCache) -> None:
    functions = dict.fromkeys(("_driver", "_done", "_enter", "_function"), mock.DEFAULT)
    with mock.patch.multiple(cuda, **functions):
        cuda.launch(cache, Source("entry", "", ()), 1, 128, 0, (), lambda: Arguments())


def _allocates(cache: ShapeCache) -> None:
    launching.launch(cache, KERNEL, (1, 1, 1), (torch.empty(4),), {})


class Map:
    """Stands for a tensor map of memory that is not the call's."""

    block_shape = (1, 1)

    def __init__(self) -> None:
        self.base = torch.zeros(4)


def _describes(cache: ShapeCache) -> None:
    launching.launch(cache, KERNEL, (1, 1, 1), (X, Map()), {})


@pytest.mark.parametrize(
    "inside",
    [
        _repeats, _launches_ordinarily, _launches_by_another_cache, _launches_in_cuda, _allocates,
        _describes,
    ],
)  # fmt: skip
def test_what_was_not_recorded_makes_a_call_run_each_time(inside: Any) -> None:
    class More(Call):
        def run(self, cache: ShapeCache, *arguments: Any) -> None:
            super().run(cache, *arguments)
            inside(cache)

    call = More()
    for _ in range(4):
        call(X, Y)
    assert call.runs == 4
    assert len(call.launched) == 6


def test_a_copy_of_what_is_not_aligned_is_foreign_in_a_shape_that_is_proven_too() -> None:
    class Copies(Call):
        def run(self, cache: ShapeCache, x: torch.Tensor, *rest: Any) -> None:
            super().run(cache, x.clone() if x.data_ptr() % 16 else x, *rest)

    call = Copies()
    for _ in range(3):
        call(X, Y)
    assert call.runs == 2
    for _ in range(3):
        call(X[1:], Y)
    assert call.runs == 5


def test_memory_inside_of_what_the_call_was_given_is_its_own() -> None:
    class Inside(Call):
        def run(self, cache: ShapeCache, x: torch.Tensor, *rest: Any) -> None:
            super().run(cache, x[4:], *rest)

    call = Inside()
    for _ in range(4):
        call(X, Y)
    assert call.runs == 2


def test_a_tensor_without_elements_is_not_foreign() -> None:
    class Empty(Call):
        def run(self, cache: ShapeCache, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
            super().run(cache, x, x[4:4], scale)

    call = Empty()
    for _ in range(4):
        call(X, Y)
    assert call.runs == 2


def test_parts_of_a_call_are_recorded() -> None:
    class Parts(Call):
        def run(self, cache: ShapeCache, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
            self.runs += 1
            for level in (1, 2):
                launching.launch(cache, self.first, (level, 1, 1), (x, level), {}, (level,))

    call = Parts()
    for _ in range(4):
        call(X, Y)
    assert call.runs == 2
    assert call.first.relaunched == [(5, X.data_ptr(), level) for level in (1, 2)] * 3


def test_the_switch_turns_replays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    call = recorded()
    monkeypatch.setattr(private_api, "REPLAY", False)
    assert private_api.fast_paths()["replay"] == "off (RLK_REPLAY=0)"
    call(X, Y)
    assert call.runs == 3
    monkeypatch.setattr(private_api, "REPLAY", True)
    assert private_api.fast_paths()["replay"] == "on"
    call(X, Y)
    assert call.runs == 3


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_the_switch_is_an_environment_variable(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REPLAY", value)
    spec = importlib.util.find_spec("rlk_kernels.private_api")
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    assert imported.REPLAY is expected


def test_unaligned_memory_is_left_to_triton() -> None:
    call = recorded()
    for _ in range(4):
        call(X[1:], Y)
    assert call.runs == 6
    assert len(call.first.ordinary) == 5


def test_a_profiler_sees_ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call = recorded()
    with monkeypatch.context() as watched:
        watched.setattr(private_api, "profiled", lambda: True)
        call(X, Y)
        call(X, Z)
    assert call.runs == 4
    assert len(call.first.ordinary) == 3
    call(X, Z)  # what a profiler saw was not recorded
    assert call.runs == 5
    assert call.first.relaunched[-1] == (5, X.data_ptr(), Z.data_ptr())


def test_ahead_nothing_is_launched() -> None:
    call = recorded()
    with launching.only_compiling():
        call(X, Y)
    assert call.runs == 3
    assert len(call.launched) == 2


def test_a_failure_leaves_no_half_of_a_recording() -> None:
    class Fails(Call):
        def run(self, *arguments: Any) -> None:
            super().run(*arguments)
            if self.runs == 2:
                raise RuntimeError("out of memory")

    call = Fails()
    call(X, Y)
    with pytest.raises(RuntimeError):
        call(X, Y)
    call(X, Y)
    assert call.runs == 3


def test_calls_of_many_launches_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_LAUNCHES", 1)
    call = recorded()
    call(X, Y)
    assert call.runs == 3


def test_few_recordings_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_REPLAYS", 2)
    call = Call()
    for x in (X, Y, Z, X, Y, Z):
        call(x, X)
    assert len(launching._replays) <= 2
