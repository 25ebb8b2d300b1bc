"""Prepares a capture of one engine: from the text of flags to a checked request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_align.api import options
from rlk_align.api.prompts import RunPrompts
from rlk_align.capture.recording import Recording
from rlk_align.capture.request import CaptureRequest
from rlk_align.errors import BadOption
from rlk_align.progress import Progress
from rlk_align.trace.run import Run

if TYPE_CHECKING:
    from rlk_align.trace.reader import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Single(options.CaptureOptions):
    """The flags of a capture."""

    engine: str
    out: Path
    tokens: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSingle:
    """A capture that is ready to start: every error that can be found early was ruled out."""

    request: CaptureRequest
    run: Run
    """The run that keeps the capture."""
    tokens: Path | None
    """The ids to score; None: the engine samples them."""
    prompts: RunPrompts
    fresh: bool
    command: tuple[str, ...]

    def start(self, progress: Progress) -> "Trace":
        """Captures the engine and returns the trace."""
        from rlk_align.capture.capture import capture_alone

        self.prompts.save()
        return capture_alone(
            self.request, self.run, self.tokens, self.fresh, self.command, progress
        )


def prepare(
    single: Single, warn: options.Warn, command: Sequence[str] | None = None
) -> PreparedSingle:
    """Checks a request, so that errors come before an engine starts. Raises RlkError.

    `command`: the command line; None for a call from Python.
    """
    engine = options.side(single.engine, single.kernels)
    if isinstance(engine, Recording):
        raise BadOption("a replay is already a capture")
    if single.tokens and single.prompts is not None:
        raise BadOption("--tokens scores the prompts of its run", "omit --prompts")
    options.check_sampling(single.max_new_tokens, single.seed)
    plan = single.plan
    run = options.choose_run(single.out, "capture")
    source = _source(single.tokens, run) if single.tokens else None
    captured = single.recorded_by(source) if source else single
    prompts = RunPrompts.of(captured.prompts, run)
    passes = ("prefill",) if source else ("decode", "prefill")
    request = captured.request(engine, plan, passes, prompts.path)

    from rlk_align.capture.check import check_request

    checked = check_request(request, sampling=source is None)
    prompts = prompts.fitting([checked], run, warn)
    for warning in checked.warnings:
        warn(warning)
    stored = single if single.prompts is None else replace(single, prompts=prompts.path)
    return PreparedSingle(
        request=replace(request, prompts=prompts.path),
        run=run,
        prompts=prompts,
        tokens=source / "tokens.parquet" if source else None,
        fresh=single.fresh,
        command=tuple(command or options.command("capture", (), stored)),
    )


def _source(tokens: str, run: Run) -> Path:
    """Returns the trace whose tokens are scored. Raises BadOption where it is in the run to be
    written."""
    source = Run.open(tokens)
    if source.folder.resolve() == run.folder.resolve():
        raise BadOption(f"--tokens and --out name one run, {run.folder}", "name another folder")
    return source.capture_folder("rollout")
