"""Kernels are compiled before they are launched, and only where there is something to compile."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlk_kernels import ahead, launching
from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.matmul import product as products


class Kernel:
    """Stands for one of Triton's."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
        self.compiled.append((grid, arguments, options))

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.ran.append((grid, arguments, options))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, as far as what is tested here asks for one."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ahead, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda")


def test_launches_compile_and_do_not_run(on_gpu: torch.device) -> None:
    kernel = Kernel()
    with compiled_ahead(on_gpu) as is_ahead:
        assert is_ahead
        launching.launch(None, kernel, (2, 1, 1), (7,), {"num_warps": 4})
    assert kernel.compiled == [((2, 1, 1), (7,), {"num_warps": 4})]
    assert kernel.ran == []
    launching.launch(None, kernel, (2, 1, 1), (7,), {"num_warps": 4})
    assert kernel.ran == kernel.compiled


def test_other_threads_go_on_launching(on_gpu: torch.device) -> None:
    kernel, other = Kernel(), Kernel()

    def launched() -> None:
        launching.launch(None, other, (1, 1, 1), (), {})

    with compiled_ahead(on_gpu):
        launching.launch(None, kernel, (1, 1, 1), (), {})
        thread = threading.Thread(target=launched)
        thread.start()
        thread.join()
    assert (len(kernel.compiled), len(kernel.ran)) == (1, 0)
    assert (len(other.compiled), len(other.ran)) == (0, 1)


def test_launches_run_again_after_an_error(on_gpu: torch.device) -> None:
    kernel = Kernel()
    with pytest.raises(ZeroDivisionError), compiled_ahead(on_gpu):
        raise ZeroDivisionError
    launching.launch(None, kernel, (1, 1, 1), (), {})
    assert len(kernel.ran) == 1


@pytest.mark.parametrize("why", ["no GPU", "captured"])
def test_where_nothing_can_be_compiled_launches_run(
    on_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "captured")
    kernel = Kernel()
    with compiled_ahead(torch.device("cpu") if why == "no GPU" else on_gpu) as is_ahead:
        assert not is_ahead
        launching.launch(None, kernel, (1, 1, 1), (), {})
    assert len(kernel.ran) == 1
    assert kernel.compiled == []


def test_every_number_of_rows_is_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []

    class Ahead:
        def __enter__(self) -> bool:
            return True

        def __exit__(self, *_: Any) -> None:
            return

    def product(x: Any, weight: Any, bias: Any, trans_a: bool, trans_b: bool, out: Any) -> None:
        launched.append((tuple(x.shape), tuple(out.shape), trans_a, trans_b))

    pytest.importorskip("triton")
    monkeypatch.setattr(products, "trusted", lambda *_: True)
    checks: list[tuple[Any, ...]] = []
    monkeypatch.setattr(products, "compile_check", lambda *asked: checks.append(asked))
    monkeypatch.setattr(products, "compiled_ahead", lambda _, wait: Ahead())
    monkeypatch.setattr(products, "product", product)
    products.compile_ahead(torch.empty(6, 4), None, [1, 3])
    assert launched == [((1, 4), (1, 6), False, True), ((3, 4), (3, 6), False, True)]
    assert checks == []
    products.compile_ahead(torch.empty(6, 4), None, [], wait=False)
    assert checks == [(torch.device("cpu"), torch.float32, False)]


def test_without_waiting_threads_go_on(on_gpu: torch.device) -> None:
    may_end, made = threading.Event(), []

    def make() -> str:
        may_end.wait(30)
        made.append("made")
        return "binary"

    with compiled_ahead(on_gpu, wait=False) as is_ahead:
        assert is_ahead
        future = ahead.submit(make)
    assert not future.done()
    # Launches run again, and what is submitted now is made at once.
    kernel = Kernel()
    launching.launch(None, kernel, (1, 1, 1), (), {})
    assert len(kernel.ran) == 1
    assert ahead.submit(len, "at once").result() == 7
    may_end.set()
    assert future.result() == "binary"
    ahead.finish()
    assert made == ["made"]


def test_a_plan_that_is_only_compiled_is_made_again_for_its_first_run(
    on_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check comes in between, and may fail."""
    asked: list[bool] = []

    def plan_for(*_: Any) -> Any:
        asked.append(launching.compiles_only())
        return SimpleNamespace(implementation="triton")

    monkeypatch.setattr(products, "plan_for", plan_for)
    monkeypatch.setattr(products, "launch", lambda *_: None)
    cache = launching.ShapeCache()
    monkeypatch.setattr(products, "shape_cache", lambda *_: cache)
    x, weight, out = torch.ones(3, 5), torch.ones(7, 5), torch.empty(3, 7)
    with launching.only_compiling():
        products.product(x, weight, None, False, True, out)
    for _ in range(2):
        products.product(x, weight, None, False, True, out)
    assert asked == [True, False]
