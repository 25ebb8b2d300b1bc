"""Runs one engine in a process of its own and gives back its Trace."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rlk_align
from rlk_align.config import (
    CaptureRequest,
    EngineSpec,
    Report,
    fingerprint,
    fingerprint_files,
    resolve_model,
)
from rlk_align.engines import require_installed
from rlk_align.engines.heartbeat import ALIVE, Pulse, pulses, stuck
from rlk_align.engines.interpreter import examine, package_path
from rlk_align.engines.job import Events, Job, error_of, failed
from rlk_align.engines.launch import death
from rlk_align.engines.probe import versions
from rlk_align.errors import BadOption, Interrupted, RlkError
from rlk_align.prompts import load_prompts, save_prompts
from rlk_align.run import Run
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import writing

CONTROL_VARIANTS = ("untapped", "repeat")
TIMEOUT = 600.0
"""Seconds after which an engine that stands still is given up, unless its spec says otherwise."""
STARTING = 1800.0
"""Seconds within which all its processes must have started. vLLM's ranks are silent until they
have loaded the model."""


def capture(
    request: CaptureRequest, role: str, run: Run, tokens: Path | None, fresh: bool, report: Report
) -> Trace:
    """The trace of one engine, captured now or, where it is there already, taken as it is.

    `tokens`: the sequences to score; None lets the engine sample them. What an interrupted
    capture had finished is kept, and this call goes on from there, unless `fresh`.
    Raises what the worker raised, EngineFailed where it died, Interrupted on Ctrl-C.
    """
    if request.engine.name == "replay":
        return _replay(request, role)
    model = resolve_model(request.model_path)
    if "python" not in request.engine.options:
        require_installed(request.engine.name)
    passes = _passes(request, sampling=tokens is None)
    folder = run.folder / "captures" / f"{role}-{_key(request, model, tokens)}"
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    missing = tuple(p for p in passes if not (folder / p / "pass.json").is_file())
    if missing or not (folder / "trace.json").is_file():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        # Production runs compiled and cannot be tapped: an engine, and so a process, of its own.
        for production in (False, True):
            part = tuple(p for p in missing if p.endswith(".production") == production)
            if part:
                job = _job(request, model, folder, tokens, part)
                _run_worker(job, request.engine.options.get("python"), report)
    return Trace(folder)


def _replay(request: CaptureRequest, role: str) -> Trace:
    path = request.engine.options.get("path")
    if path is None:
        raise BadOption("engine 'replay' needs path=RUN", "replay:path=RUN")
    return Trace(Run.open(str(path)).capture_folder(role))


def _passes(request: CaptureRequest, sampling: bool) -> tuple[str, ...]:
    """Each observed pass with its controls; a pass that only has to sample goes un-tapped."""
    passes: list[str] = []
    if sampling and "decode" not in request.passes:
        passes.append("decode.untapped")
    for name in request.passes:
        if name != "decode" or sampling:
            passes += [name, *(f"{name}.{v}" for v in CONTROL_VARIANTS)]
    if request.production:
        passes.append("prefill.production")
    return tuple(passes)


def _key(request: CaptureRequest, model: Path, tokens: Path | None) -> str:
    """Names a capture after everything that decides what is in it."""
    patch = request.engine.options.get("patch")
    return fingerprint(
        rlk_align.__version__,
        str(request.engine.computed),
        _versions(request),
        fingerprint_files(model),
        request.prompts.read_bytes().hex() if request.prompts.is_file() else None,
        tokens.read_bytes().hex() if tokens else [request.max_new_tokens, request.seed],
        [request.trace.budget, request.trace.layers, request.trace.sites],
        _source(str(patch).partition(":")[0]) if patch else None,
    )


def _versions(request: CaptureRequest) -> list[str]:
    """Of the packages that decide the numbers, in the interpreter that the engine runs in."""
    module = request.engine.info.package.partition(".")[0]
    python = request.engine.options.get("python")
    if python is not None:
        found = examine(str(python), module)
    else:
        found = versions(["torch", "transformers"], [module] if module else [])
    return [f"{name} {version}" for name, version in found.items()]


def _source(module: str) -> str | None:
    """The text of a patch's module, so that an edit makes another capture."""
    relative = Path(*module.split("."))
    for base in (Path.cwd(), *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        for path in (base / relative.with_suffix(".py"), base / relative / "__init__.py"):
            if path.is_file():
                return path.read_text(encoding="utf-8", errors="replace")
    return None


def _job(
    request: CaptureRequest, model: Path, folder: Path, tokens: Path | None, passes: tuple[str, ...]
) -> Job:
    return Job(
        engine=str(request.engine),
        timeout=float(request.engine.options.get("timeout", TIMEOUT)),
        model=model,
        folder=folder.resolve(),
        prompts=request.prompts.resolve(),
        tokens=tokens.resolve() if tokens else None,
        passes=passes,
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        budget=request.trace.budget,
        layers=request.trace.layers,
        sites=request.trace.sites,
    )


def _run_worker(job: Job, python: Any, report: Report) -> None:
    log, package = job.folder / "worker.log", Path(rlk_align.__file__).resolve().parent
    with writing(job.folder):
        (job.folder / "events.jsonl").unlink(missing_ok=True)
        shutil.rmtree(job.folder / ALIVE, ignore_errors=True)
        kept = job.folder / "prompts.jsonl"
        if job.prompts != kept:
            save_prompts(load_prompts(job.prompts), kept)
        (job.folder / "job.json").write_text(job.model_dump_json(indent=1), encoding="utf-8")
        for old in job.folder.glob("rank*.log"):
            old.unlink()
        here = str(package_path(job.folder, package) if python else package.parent)
        output = log.open("w")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), here]))
    interpreter = str(python or sys.executable)
    command = [interpreter, "-m", "rlk_align.engines.worker", str(job.folder / "job.json")]
    try:
        with output:
            worker = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Idle OpenMP threads sleep: spinning, they starve whoever shares the machine.
                env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": path},
                # A group of its own: Ctrl-C reaches the parent, which ends the whole group.
                start_new_session=True,
            )
    except OSError as error:
        raise BadOption(f"python={interpreter} cannot be started: {error}") from error
    try:
        told = _follow(worker, job, report)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            f"interrupted; what {job.engine} had finished is kept in {job.folder}",
            "the same command goes on from there",
        ) from interrupt
    finally:
        _end_group(worker)
        shutil.rmtree(job.folder / ALIVE, ignore_errors=True)
    if told is not None:
        raise told
    if worker.returncode:
        raise failed(f"the worker of {job.engine} {death(worker.returncode)}", log)


def _follow(worker: subprocess.Popen, job: Job, report: Report) -> RlkError | None:
    """Passes the worker's progress on until it ends; returns the error that it named.

    Raises EngineFailed where its processes stand still for longer than the job allows.
    """
    events, error = Events(job.folder), None
    started = looked = time.monotonic()
    while True:
        ended = worker.poll() is not None
        for event in events.unread():
            if "stage" in event:
                report(event["stage"], event.get("done", 0), event.get("total", 0))
            elif event["rank"] is None:
                error = error_of(event)
        if ended:
            return error
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            _check_moving(job, looked - started)
        time.sleep(0.05)


def _check_moving(job: Job, seconds: float) -> None:
    """`seconds`: since the worker was started."""
    found = pulses(job.folder / ALIVE)
    present, patience = {p.name for p in found}, max(job.timeout, STARTING)
    missing = [p for p in EngineSpec.parse(job.engine).processes if p not in present]
    longer = "timeout=SECONDS in the engine spec gives it longer"
    if missing:
        if seconds > patience:
            what = f"{job.engine} has not started in {patience:g} s: {', '.join(missing)} missing"
            raise failed(what, _log_of(job.folder, missing[0]), longer)
        return
    held_up = stuck(found, job.timeout)
    if held_up:
        what = "; ".join(map(_standing, held_up))
        raise failed(
            f"{job.engine} has stood still for {job.timeout:g} s: {what}",
            _log_of(job.folder, held_up[0].name),
            longer,
            held_up[0].pid,
        )


def _standing(pulse: Pulse) -> str:
    verb = "waits for others" if pulse.waiting else "stands"
    if pulse.stopped:
        verb = "is stopped, or does not let other threads run,"
    return f"{pulse.name} (process {pulse.pid}) {verb} at {pulse.where}"


def _log_of(folder: Path, name: str) -> Path:
    log = folder / f"{name.replace(' ', '')}.log"
    return log if log.is_file() else folder / "worker.log"


def _end_group(worker: subprocess.Popen) -> None:
    """Ends whatever the worker's process group still runs."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            return
        try:
            worker.wait(patience)
        except subprocess.TimeoutExpired:
            continue
