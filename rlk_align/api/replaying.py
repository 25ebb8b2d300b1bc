"""A recorded request whose tokens are to be drawn again: from words to a request that may start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_align.api import options
from rlk_align.capture.recording import Recording
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.errors import BadOption, DumpError
from rlk_align.progress import Progress
from rlk_align.trace.records import writing
from rlk_align.trace.run import Run, is_imported
from rlk_align.trace.run_folder import RUN_JSON

if TYPE_CHECKING:
    from rlk_align.logs.replay.record import Replay
    from rlk_align.logs.replay.request import RecordedRequest
    from rlk_align.trace.reader import Trace

CHOSEN = "chosen"
"""The folder in the run with the request's ids."""
OF_THE_RECORD = ("temperature", "top_k", "top_p", "min_p", "sampler", "logprobs")
"""Options of an engine that the record states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaying:
    """The flags of a replay."""

    name: str
    """The request's id."""
    tokens: str
    engine: str
    step: int | None = None
    model: str | None = None
    kernels: str | None = None
    run_dir: Path | None = None
    fresh: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedReplay:
    """A replay that is ready to start: every error that can be found early was ruled out."""

    recorded: "RecordedRequest"
    source: "Trace | None"
    """The capture that has the request; None for one of a dump."""
    request: CaptureRequest
    ids: Path
    """The table of the request's ids."""
    run: Run
    fresh: bool
    command: tuple[str, ...]

    def start(self, progress: Progress) -> "Replay":
        """Scores the request's ids alone, and draws its tokens from the logits."""
        from rlk_align.capture.capture import capture_alone
        from rlk_align.compare.measure import engine_record
        from rlk_align.engines.patch import redraw
        from rlk_align.logs.replay.capture import DECODE, PREFILL, recorded, sample_of
        from rlk_align.logs.replay.redraw import replay

        trace = capture_alone(self.request, self.run, self.ids, self.fresh, self.command, progress)
        here, at = self.recorded, self.recorded.at
        logits = recorded(trace, PREFILL, "logits", trace.tokens, 0, at)
        before = [None] * len(at)
        if (source := self.source) is not None:
            number = sample_of(source, here.name)
            before = recorded(source, DECODE, "logits", source.tokens, number, at)
        return replay(here, logits, before, engine_record(trace), redraw)


def prepare(
    replaying: Replaying, warn: options.Warn, progress: Progress, command: Sequence[str]
) -> PreparedReplay:
    """Checks a request, so that errors come before an engine starts. Raises RlkError."""
    engine = options.side(replaying.engine, replaying.kernels)
    if isinstance(engine, Recording):
        raise BadOption(f"--engine {replaying.engine}: a recording computes no logits")
    if stated := [name for name in OF_THE_RECORD if name in engine.options]:
        raise BadOption(
            f"--engine {replaying.engine}: the record states {', '.join(stated)}",
            "leave these options out",
        )
    names = replaying.tokens, replaying.name, replaying.step, str(engine), replaying.model
    run = options.choose_run(replaying.run_dir, "replay", *names)
    recorded, source = _recorded(replaying, run, command, progress)
    capturing = options.CaptureOptions(model=replaying.model, fresh=replaying.fresh)
    folder = run.folder / CHOSEN
    if source is not None:
        capturing = capturing.recorded_by(source.folder)
    plan = TracePlan(sites=("logits",))
    prompts = folder / "prompts.jsonl"
    request = capturing.request(engine, plan, ("prefill",), prompts)

    from rlk_align.capture.check import check_request
    from rlk_align.logs.rescore.batch import check_fits, prompts_of
    from rlk_align.model.prompts import save_prompts

    checked = check_request(request, sampling=False)
    for warning in checked.warnings:
        warn(warning)
    check_fits(recorded.batch, checked.shape, checked.context, "--engine")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_prompts(prompts_of(recorded.batch), prompts)
        recorded.batch.save(folder / "tokens.parquet")
    return PreparedReplay(
        recorded=recorded,
        source=source,
        # The draws say more than a repetition of the pass.
        request=replace(request, controls=False),
        ids=folder / "tokens.parquet",
        run=run,
        fresh=replaying.fresh,
        command=tuple(command),
    )


def _recorded(
    replaying: Replaying, run: Run, command: Sequence[str], progress: Progress
) -> "tuple[RecordedRequest, Trace | None]":
    """The request, and the capture that has it."""
    from rlk_align.api.rescoring import open_dump
    from rlk_align.logs.replay.request import of_dump

    name, path = replaying.tokens, Path(replaying.tokens)
    if (name == "@last" or (path / RUN_JSON).is_file()) and not is_imported(name):
        from rlk_align.logs.replay.capture import of_capture
        from rlk_align.trace.reader import Trace

        if replaying.step is not None:
            raise BadOption("--step is for a dump of several steps", "leave it out")
        recorded = Run.open(name)
        if recorded.folder.resolve() == run.folder.resolve():
            raise BadOption(
                f"--tokens and --run-dir name one run, {run.folder}", "name another --run-dir"
            )
        trace = Trace(recorded.capture_folder("rollout"))
        return of_capture(trace, replaying.name), trace
    if not path.exists() and name != "@last":
        raise DumpError(f"{name} does not exist", "name a run's folder, or a file of log-probs")
    dump = open_dump(name, run, command, progress)
    return of_dump(dump.sequences(), replaying.name, replaying.step), None
