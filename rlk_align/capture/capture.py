"""Runs one engine in a process of its own and returns its Trace."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlk_align.capture.key import capture_key
from rlk_align.capture.recording import Recording
from rlk_align.capture.request import CaptureRequest
from rlk_align.capture.supervise import run_worker
from rlk_align.engines.process.job import Job
from rlk_align.engines.registry import require_installed
from rlk_align.errors import CorruptTrace
from rlk_align.model.checkpoint import resolve_model
from rlk_align.model.outline import read_outline
from rlk_align.model.shape import read_shape
from rlk_align.progress import Progress, labelled
from rlk_align.trace.reader import Trace
from rlk_align.trace.records import REPAIR, writing
from rlk_align.trace.run import Role, Run, RunRecord
from rlk_align.trace.schema import passes_in

CONTROL_VARIANTS = ("untapped", "repeat")


def capture(
    request: CaptureRequest | Recording,
    role: Role,
    run: Run,
    tokens: Path | None,
    fresh: bool,
    progress: Progress,
) -> Trace:
    """The trace of one side: recorded earlier, or captured now if it does not exist yet.

    `tokens`: the sequences to score; None lets the engine sample them. Unless `fresh`, the finished
    passes of an interrupted capture are kept, and the capture continues from there. Raises the
    worker's error, or EngineFailed if the worker died.
    """
    if isinstance(request, Recording):
        return Trace(request.folder(role))
    job = _planned(request, role, run, tokens)
    folder, progress = job.folder, labelled(progress, role)
    if fresh and folder.is_symlink():
        folder.unlink()
    elif fresh and folder.exists():
        with writing(folder):
            shutil.rmtree(folder)
    finished = passes_in(folder)
    missing = tuple(p for p in job.passes if p not in finished)
    if not missing:
        progress("the capture already exists and is used as it is", 0, 0)
    else:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        # Compiled code cannot be tapped, so it runs in a separate engine and process.
        separate = job.engine.info.compiles
        for production in (False, True):
            part = tuple(
                p for p in missing if (separate and p.endswith(".production")) == production
            )
            if part:
                run_worker(job.model_copy(update={"passes": part}), progress)
    return open_trace(job)


def capture_alone(
    request: CaptureRequest,
    run: Run,
    tokens: Path | None,
    fresh: bool,
    command: tuple[str, ...],
    progress: Progress,
) -> Trace:
    """The trace of a run with a single capture. Raises the errors of `capture`."""
    with run.locked():
        run.invalidate()
        trace = capture(request, "capture", run, tokens, fresh, progress)
        captures = run.relative({"capture": trace.folder})
        run.save(RunRecord(command=list(command), captures=captures))
        run.finish()
    return trace


def capture_each(
    requests: Sequence[CaptureRequest],
    role: Role,
    run: Run,
    tokens: Sequence[Path | None],
    progress: Progress,
) -> list[Trace]:
    """The traces of requests that differ only in their engine's fault, their seed and their tokens.
    One process captures those that do not exist yet. Raises the errors of `capture`."""
    pairs = zip(requests, tokens, strict=True)
    jobs = [_planned(request, role, run, ids) for request, ids in pairs]
    missing = [j for j in jobs if not set(j.passes) <= set(passes_in(j.folder))]
    if missing:
        for job in missing:
            with writing(job.folder):
                job.folder.mkdir(parents=True, exist_ok=True)
        first, *then = missing
        run_worker(first.model_copy(update={"then": tuple(then)}), progress)
    return [open_trace(job) for job in jobs]


def _planned(request: CaptureRequest, role: Role, run: Run, tokens: Path | None) -> Job:
    """The job of a whole capture, including the passes that exist already."""
    model = resolve_model(request.model_path)
    if request.engine.option("python") is None:
        require_installed(request.engine.name)
    shape = read_outline(model) if request.modules else read_shape(model)
    spec = request.engine.canonical(shape.dtype)
    key = capture_key(request, spec, model, tokens)
    folder = run.folder / "captures" / f"{role}-{key}"
    return Job(
        engine=spec,
        model=model,
        folder=folder.resolve(),
        key=key,
        prompts=request.prompts.resolve(),
        tokens=tokens.resolve() if tokens else None,
        passes=_passes(request, sampling=tokens is None),
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        budget=request.trace.budget,
        layers=request.trace.layers,
        sites=request.trace.sites,
        modules=request.modules,
    )


def open_trace(job: Job) -> Trace:
    """The trace of a job. Raises CorruptTrace if the folder has another one."""
    trace = Trace(job.folder)
    if trace.record.key != job.key:
        raise CorruptTrace(f"{job.folder} holds another capture, {trace.record.key}", REPAIR)
    return trace


def _passes(request: CaptureRequest, sampling: bool) -> tuple[str, ...]:
    """Each observed pass with its controls; a pass that only samples is not tapped."""
    passes: list[str] = []
    if sampling and "decode" not in request.passes:
        passes.append("decode.untapped")
    for name in request.passes:
        if name != "decode" or sampling:
            passes += [name, *(f"{name}.{v}" for v in CONTROL_VARIANTS if request.controls)]
    if request.production:
        observed = (name for name in request.passes if name != "decode" or sampling)
        passes += (f"{name}.production" for name in observed)
    return tuple(passes)
