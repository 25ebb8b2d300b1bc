"""What a self-test keeps on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rlk_align.selftest.fault_trials import _SelfTest


def test_a_clean_capture_that_others_are_compared_with_is_kept(tmp_path: Path) -> None:
    """A fault of decode that changes no token has the same clean scores as the other faults."""
    shared, own = (SimpleNamespace(folder=tmp_path / name) for name in ("shared", "own"))
    for trace in (shared, own):
        trace.folder.mkdir()
    nothing = cast("Any", None)
    trials = _SelfTest(nothing, nothing, nothing, nothing, {("hf", ""): cast("Any", shared)})
    for trace in (shared, own):
        trials._discard(cast("Any", trace))
    assert shared.folder.exists()
    assert not own.folder.exists()
