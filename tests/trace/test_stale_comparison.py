"""What an earlier command concluded is never judged as the result of one that failed."""

from pathlib import Path

import pytest
from synthetic import compared_run

from rlk_align import pipeline
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import CorruptTrace, EngineFailed, Interrupted
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run


@pytest.fixture
def concluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run folder in which an earlier compare has left its conclusions."""
    monkeypatch.chdir(tmp_path)
    return compared_run(tmp_path / "run")


@pytest.mark.parametrize("stage", ["capture", "measure"])
def test_a_compare_that_fails_leaves_nothing_to_judge(
    concluded: Run, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: object) -> None:
        raise EngineFailed("it died")

    if stage == "measure":
        traces = concluded.folder / "captures"
        monkeypatch.setattr(pipeline, "capture", lambda _, role, *rest: Trace(traces / role))
    monkeypatch.setattr(pipeline, stage, fail)
    side = CaptureRequest(engine=EngineSpec("hf"), model="m", prompts=Path("p"))
    request = pipeline.CompareRequest(rollout=side, train=side, command=("rlk-align", "compare"))
    with pytest.raises(EngineFailed):
        pipeline.compare(request, concluded, lambda *_: None)
    assert not (concluded.folder / "verdict.json").exists()
    with pytest.raises(CorruptTrace, match="did not finish"):
        Run.open(str(concluded.folder))


def test_an_interrupt_while_comparing_says_what_is_kept(
    concluded: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    traces = concluded.folder / "captures"
    monkeypatch.setattr(pipeline, "capture", lambda _, role, *rest: Trace(traces / role))
    monkeypatch.setattr(pipeline, "measure", interrupt)
    side = CaptureRequest(engine=EngineSpec("hf"), model="m", prompts=Path("p"))
    request = pipeline.CompareRequest(rollout=side, train=side, command=("rlk-align", "compare"))
    with pytest.raises(Interrupted, match=r"what was finished is kept in .*run") as raised:
        pipeline.compare(request, concluded, lambda *_: None)
    assert "continues from there" in raised.value.fix
