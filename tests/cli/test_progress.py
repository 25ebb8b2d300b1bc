"""Progress on stderr where there is no terminal, as in CI."""

import threading

import pytest

from rlk_align import progress
from rlk_align.progress import labelled, show_progress


def test_each_stage_is_told_once_and_a_long_one_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SIGN_OF_LIFE", 0.2)
    with show_progress("compare") as tell:
        inner = labelled(labelled(tell, "kernels rlk"), "rollout")
        inner("loading vllm", 0, 0)
        threading.Event().wait(0.7)
        inner("decode", 0, 6)
        inner("decode", 3, 6)
        threading.Event().wait(0.3)
    said = [line.partition("s ")[2] for line in capfd.readouterr().err.splitlines()]
    start = "compare: kernels rlk: rollout: loading vllm"
    assert said[0] == start
    assert said.count("compare: still kernels rlk: rollout: loading vllm") >= 2
    assert said[-2:] == [
        "compare: kernels rlk: rollout: decode",
        "compare: still kernels rlk: rollout: decode 3/6",
    ]


def test_nothing_is_told_behind_its_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SIGN_OF_LIFE", 0.05)

    def fails() -> None:
        with show_progress("compare") as tell:
            tell("loading", 0, 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    capfd.readouterr()
    threading.Event().wait(0.2)
    assert capfd.readouterr().err == ""
