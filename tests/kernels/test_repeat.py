"""Launches of a call that are made again without the call's own code."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rlk_kernels import cuda, direct, launching
from rlk_kernels.cuda import Arguments
from rlk_kernels.nvrtc import Source

pytest.importorskip("triton")


class Kernel:
    """Stands for a kernel that Triton has compiled."""

    def __init__(self) -> None:
        self.ordinary: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        run = SimpleNamespace(
            launch=self._launch, global_scratch_size=0, profile_scratch_size=0,
            launch_cooperative_grid=False, launch_pdl=True,
        )  # fmt: skip
        self._compiled = SimpleNamespace(packed_metadata=(), function=7, run=run)

    def _launch(self, *given: Any) -> None:
        self.again.append((given[3], *given[13:]))

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
        self.seen: dict[Any, Any] = {}
        self.runs = 0

    def run(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
        self.runs += 1
        launching.launch(self.seen, self.first, (1, 1, 1), (x, y), {})
        launching.launch(self.seen, self.second, (2, 1, 1), (y, scale), {})

    def __call__(self, x: torch.Tensor, y: torch.Tensor, scale: float = 0.5) -> None:
        key = x.data_ptr(), y.data_ptr(), scale
        launching.repeat(self.seen, key, self.run, x, y, scale)

    @property
    def launched(self) -> list[tuple[Any, ...]]:
        return [*self.first.again, *self.second.again]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU that is not there: its number and its stream."""
    found = SimpleNamespace(device=0, stream=5)
    monkeypatch.setattr(direct, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: found.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(launching, "_sequences", {})
    yield found
    direct.thread.steps = None
    direct.thread.only_compiles = False


X, Y, Z = torch.zeros(8), torch.zeros(8), torch.zeros(8)


def recorded() -> Call:
    call = Call()
    for _ in range(2):  # compiled, then recorded
        call(X, Y)
    assert call.runs == 2
    return call


@pytest.mark.usefixtures("here")
def test_the_same_is_launched_without_the_call_s_code() -> None:
    call = recorded()
    for _ in range(3):
        call(X, Y)
    assert call.runs == 2
    assert call.first.again == [(5, X.data_ptr(), Y.data_ptr())] * 4
    assert call.second.again == [(5, Y.data_ptr(), 0.5)] * 4
    assert len(call.first.ordinary) == len(call.second.ordinary) == 1


@pytest.mark.usefixtures("here")
def test_other_memory_and_other_numbers_are_a_call_s_own() -> None:
    call = recorded()
    call(X, Z)
    call(X, Y, 0.25)
    assert call.runs == 4
    assert call.first.again[-2:] == [(5, X.data_ptr(), Z.data_ptr()), call.first.again[0]]
    assert [scale for *_, scale in call.second.again[-2:]] == [0.5, 0.25]


@pytest.mark.parametrize("what", ["stream", "device"])
def test_another_stream_or_gpu_is_launched_on(here: SimpleNamespace, what: str) -> None:
    call = recorded()
    setattr(here, what, 9)
    call(X, Y)
    assert call.runs == 3
    assert call.launched[-1][0] == (9 if what == "stream" else 5)


@pytest.mark.usefixtures("here")
def test_two_shapes_share_nothing() -> None:
    one, other = recorded(), recorded()
    other(X, Y)
    assert (len(one.launched), len(other.launched)) == (2, 4)


def _allocates(call: Call) -> None:
    direct.empty((4,), torch.float32, torch.device("cpu"))


def _repeats(call: Call) -> None:
    launching.repeat({}, (), lambda: None)


def _runs_otherwise(call: Call) -> None:
    launching.launch({}, Kernel(), (1, 1, 1), (X,), {})


def _launches_in_cuda(call: Call) -> None:
    direct.thread.only_compiles = True
    with mock.patch.object(cuda, "binary"):
        cuda.launch({}, Source("entry", "", ()), 1, 128, 0, (), lambda: Arguments())
    direct.thread.only_compiles = False


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("inside", [_allocates, _repeats, _runs_otherwise, _launches_in_cuda])
def test_what_does_more_than_launch_is_never_repeated(inside: Any) -> None:
    class More(Call):
        def run(self, *given: Any) -> None:
            super().run(*given)
            inside(self)

    call = More()
    for _ in range(4):
        call(X, Y)
    assert call.runs == 4
    assert len(call.launched) == 6


@pytest.mark.usefixtures("here")
def test_unaligned_memory_is_left_to_triton() -> None:
    call = Call()
    for _ in range(4):
        call(X[1:], Y)
    assert call.runs == 4
    assert len(call.first.ordinary) == 4


@pytest.mark.usefixtures("here")
def test_a_profiler_sees_ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call = recorded()
    with monkeypatch.context() as watched:
        watched.setattr(launching, "_watched", lambda: True)
        call(X, Y)
        call(X, Z)
    assert call.runs == 4
    assert len(call.first.ordinary) == 3
    call(X, Z)  # no step was kept of what a profiler saw
    assert call.runs == 5
    assert call.first.again[-1] == (5, X.data_ptr(), Z.data_ptr())


@pytest.mark.usefixtures("here")
def test_ahead_nothing_is_launched() -> None:
    call = recorded()
    direct.thread.only_compiles = True
    call(X, Y)
    assert call.runs == 3
    assert len(call.launched) == 2


@pytest.mark.usefixtures("here")
def test_a_failure_leaves_no_half_of_a_sequence() -> None:
    class Fails(Call):
        def run(self, *given: Any) -> None:
            super().run(*given)
            if self.runs == 2:
                raise RuntimeError("out of memory")

    call = Fails()
    call(X, Y)
    with pytest.raises(RuntimeError):
        call(X, Y)
    assert direct.thread.steps is None
    call(X, Y)
    assert call.runs == 3


@pytest.mark.usefixtures("here")
def test_long_sequences_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "STEPS", 1)
    call = recorded()
    call(X, Y)
    assert call.runs == 3


@pytest.mark.usefixtures("here")
def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "SEQUENCES", 2)
    call = Call()
    for x in (X, Y, Z, X, Y, Z):
        call(x, X)
    assert len(launching._sequences) <= 2
