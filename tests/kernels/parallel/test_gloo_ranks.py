"""The ranks that the tests start, when one of them fails."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import gloo_ranks
import pytest
from gloo_ranks import on_ranks


@pytest.fixture(autouse=True)
def others_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_ranks, "LEFT", 0.5)


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _ends() -> None:
    os._exit(3)


def _raises() -> None:
    raise ValueError("a planted error")


def _fails() -> None:
    pytest.fail("a planted failure")


def _second(group: Any, run: Callable[[], None]) -> None:
    """The second rank raises an error, and the first waits for it."""
    if group.rank() == 1:
        run()
    time.sleep(60)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (_dies, "rank 1 ended with exit code -9"),
        (_ends, "rank 1 ended with exit code 3"),
        (_raises, "ValueError: a planted error"),
        (_fails, "a planted failure"),
    ],
)
def test_a_rank_that_fails_ends_the_others(run: Callable[[], None], message: str) -> None:
    begins = time.monotonic()
    with pytest.raises(AssertionError, match=message) as caught:
        on_ranks(2, _second, run)
    assert "rank 0 did not end" in str(caught.value)
    assert time.monotonic() - begins < 30


def _unlike_anything_that_is_saved(_group: Any) -> Any:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(AssertionError, match="rank 0: Traceback"):
        on_ranks(1, _unlike_anything_that_is_saved)
