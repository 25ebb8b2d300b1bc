"""Starts a worker, follows it to its end, and ends whatever it leaves behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rlk_align.engines.process.heartbeat import HEARTBEATS, Heartbeat, heartbeats, stuck
from rlk_align.engines.process.interpreter import package_path
from rlk_align.engines.process.job import Events, Job, error_of, failed
from rlk_align.engines.process.launch import death
from rlk_align.errors import BadOption, RlkError
from rlk_align.model.prompts import load_prompts, save_prompts
from rlk_align.model.tokenise import rendered
from rlk_align.progress import Progress
from rlk_align.trace.records import writing
from rlk_align.trace.schema import passes_in

STARTING = 1800.0
"""Seconds within which all its processes must have started. vLLM's ranks are silent until they
have loaded the model."""

PATIENCE = 5.0
"""Seconds that processes get to end after they were asked to."""


def run_worker(job: Job, progress: Progress) -> None:
    """Carries the job out in a process of its own.

    Raises what the worker raised, EngineFailed where it died. Ctrl-C ends it too.
    """
    log = job.folder / "worker.log"
    worker = _start(_with_recorded_prompts(job, progress), log)
    try:
        error = _follow(worker, job, progress)
    finally:
        _end_group(worker)
        shutil.rmtree(job.folder / HEARTBEATS, ignore_errors=True)
    if error is not None:
        raise error
    if worker.returncode:
        raise failed(f"the worker of {job.engine} {death(worker.returncode)}", log)
    for done in (job, *job.then):
        if not set(done.passes) <= set(passes_in(done.folder)):
            what = f"the worker of {done.engine} ended before it finished its passes"
            raise failed(what, log, "does the engine, or its patch, end the process?")


def _with_recorded_prompts(job: Job, progress: Progress) -> Job:
    """The job on its prompts as its folder keeps them: messages are rendered here, once, so that
    all of its processes tokenise the same text."""
    recorded = job.folder / "prompts.jsonl"
    if job.prompts == recorded:
        return job
    prompts = rendered(job.model, load_prompts(job.prompts))
    count = sum(p.rendered for p in prompts)
    if count:
        progress(f"{count} of {len(prompts)} prompts rendered by the model's chat template", 0, 0)
    for each in (job, *job.then):
        with writing(each.folder):
            save_prompts(prompts, each.folder / "prompts.jsonl")
    return job.model_copy(update={"prompts": recorded})


def _start(job: Job, log: Path) -> subprocess.Popen:
    package = Path(__file__).resolve().parents[1]
    python = job.engine.option("python")
    with writing(job.folder):
        (job.folder / "events.jsonl").unlink(missing_ok=True)
        shutil.rmtree(job.folder / HEARTBEATS, ignore_errors=True)
        (job.folder / "job.json").write_text(job.model_dump_json(indent=1), encoding="utf-8")
        for old in job.folder.glob("rank*.log"):
            old.unlink()
        here = str(package_path(job.folder, package) if python else package.parent)
        output = log.open("w")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), here]))
    interpreter = str(python or sys.executable)
    command = [interpreter, "-m", "rlk_align.engines.worker", str(job.folder / "job.json")]
    # Idle OpenMP threads sleep: spinning, they starve other processes of the machine.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": path}
    try:
        with output:
            return start_process(command, environment, output)
    except OSError as error:
        raise BadOption(f"python={interpreter} cannot be started: {error}") from error


def start_process(
    command: Sequence[str], environment: Mapping[str, str], output: IO[str]
) -> subprocess.Popen:
    """The worker's process, which writes to `output`."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        # A group of its own: Ctrl-C reaches the parent, which ends the whole group.
        start_new_session=True,
    )


def _follow(worker: subprocess.Popen, job: Job, progress: Progress) -> RlkError | None:
    """Passes the worker's progress on until it ends; returns the error that it named.

    Raises EngineFailed where its processes stand still for longer than the job allows.
    """
    events, error = Events(job.folder), None
    started = looked = time.monotonic()
    while True:
        ended = worker.poll() is not None
        for event in events.unread():
            if "stage" in event:
                progress(event["stage"], event.get("done", 0), event.get("total", 0))
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
    beats = heartbeats(job.folder / HEARTBEATS)
    present, patience = {h.name for h in beats}, max(job.timeout, STARTING)
    missing = [p for p in job.engine.processes if p not in present]
    longer = "timeout=SECONDS in the engine spec gives it longer"
    if missing:
        if seconds > patience:
            what = f"{job.engine} has not started in {patience:g} s: {', '.join(missing)} missing"
            raise failed(what, _log_of(job.folder, missing[0]), longer)
        return
    held_up = stuck(beats, job.timeout)
    if held_up:
        what = "; ".join(map(_standing, held_up))
        raise failed(
            f"{job.engine} has made no progress for {job.timeout:g} s: {what}",
            _log_of(job.folder, held_up[0].name),
            longer,
            held_up[0].pid,
        )


def _standing(heartbeat: Heartbeat) -> str:
    verb = "waits for others" if heartbeat.waiting else "stands"
    if heartbeat.stopped:
        verb = "is stopped, or does not let other threads run,"
    return f"{heartbeat.name} (process {heartbeat.pid}) {verb} at {heartbeat.where}"


def _log_of(folder: Path, name: str) -> Path:
    log = folder / f"{name.replace(' ', '')}.log"
    return log if log.is_file() else folder / "worker.log"


def _end_group(worker: subprocess.Popen) -> None:
    """Ends whatever the worker's process group still runs. All of it gets the same time to end by
    itself: a rank may have more to do than the worker that started it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            return
        patience_ends = time.monotonic() + PATIENCE
        while worker.poll() is None or _runs(worker.pid):
            if time.monotonic() > patience_ends:
                break
            time.sleep(0.02)
        else:
            return


def _runs(group: int) -> bool:
    """Whether any process of a group still computes: one that ended and that nobody has asked for
    its exit code is there, and does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                return True
    return not Path("/proc/self/stat").exists()
