"""A run with the capture of a single engine, for a comparison later or elsewhere."""

from pathlib import Path

from rlk_align.capture.capture import capture
from rlk_align.capture.request import CaptureRequest
from rlk_align.progress import Progress
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run, RunRecord


def capture_alone(
    request: CaptureRequest,
    run: Run,
    tokens: Path | None,
    fresh: bool,
    command: tuple[str, ...],
    progress: Progress,
) -> Trace:
    """`tokens`: the sequences to score; None lets the engine sample them. Raises the errors of
    `capture`."""
    with run.locked():
        run.invalidate()
        trace = capture(request, "capture", run, tokens, fresh, progress)
        captures = run.relative({"capture": trace.folder})
        run.save(RunRecord(command=list(command), captures=captures))
        run.finish()
    return trace
