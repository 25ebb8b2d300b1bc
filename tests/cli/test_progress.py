"""What a log is told of long work."""

import re

import pytest

from rlk_align import progress
from rlk_align.progress import show_progress


def test_a_log_is_told_of_each_stage_and_how_far_a_long_one_has_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 1.0, 2.0, 30.0, 30.0, 31.0, 32.0, 32.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with show_progress("probe") as tell:
        tell("decomposing", 0, 90)
        tell("decomposing", 1, 90)
        tell("decomposing", 40, 90)
        tell("decomposing", 41, 90)
        tell("judging", 0, 0)
    said = [re.sub(" +", " ", line).strip() for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "1.0s probe: decomposing",
        "30.0s probe: decomposing 40/90",
        "32.0s probe: judging",
    ]
