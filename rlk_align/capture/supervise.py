"""Starts a worker, follows it until it ends, and ends the processes that it leaves behind."""

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

START_TIMEOUT = 1800.0
"""Seconds within which all processes must have started. vLLM's ranks write no heartbeat until they
have loaded the model."""

GRACE = 5.0
"""Seconds that processes have to end after a signal."""


def run_worker(job: Job, progress: Progress) -> None:
    """Runs a job in a worker process, which Ctrl-C ends as well.

    Raises the worker's error, or EngineFailed if the worker died.
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
            raise failed(what, log, "check whether the engine or its patch ends the process")


def _with_recorded_prompts(job: Job, progress: Progress) -> Job:
    """The job with the prompts that its folder records: messages are rendered here, once, so that
    all processes tokenise the same text."""
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
    # Idle OpenMP threads sleep, because spinning threads slow down all other processes.
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
        # Ctrl-C reaches only the parent, which ends the whole process group of the worker.
        start_new_session=True,
    )


def _follow(worker: subprocess.Popen, job: Job, progress: Progress) -> RlkError | None:
    """Reports the worker's progress until it ends; returns the error that it reported.

    Raises EngineFailed if its processes make no progress for longer than the job allows.
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
    """Raises EngineFailed if processes are missing or stuck, `seconds` after the start."""
    beats = heartbeats(job.folder / HEARTBEATS)
    present, limit = {h.name for h in beats}, max(job.timeout, START_TIMEOUT)
    missing = [p for p in job.engine.processes if p not in present]
    longer = "timeout=SECONDS in the engine spec sets a longer limit"
    if missing:
        if seconds > limit:
            what = f"{job.engine} has not started in {limit:g} s: {', '.join(missing)} missing"
            raise failed(what, _log_of(job.folder, missing[0]), longer)
        return
    to_blame = stuck(beats, job.timeout)
    if to_blame:
        what = "; ".join(map(_described, to_blame))
        raise failed(
            f"{job.engine} has made no progress for {job.timeout:g} s: {what}",
            _log_of(job.folder, to_blame[0].name),
            longer,
            to_blame[0].pid,
        )


def _described(heartbeat: Heartbeat) -> str:
    state = "waits for others" if heartbeat.waiting else "is stuck"
    if heartbeat.stopped:
        state = "is stopped, or does not let other threads run,"
    return f"{heartbeat.name} (process {heartbeat.pid}) {state} at {heartbeat.where}"


def _log_of(folder: Path, name: str) -> Path:
    log = folder / f"{name.replace(' ', '')}.log"
    return log if log.is_file() else folder / "worker.log"


def _end_group(worker: subprocess.Popen) -> None:
    """Ends all processes of the worker's group. They have the same time to end by themselves: a
    rank may need longer than the worker that started it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + GRACE
        while worker.poll() is None or _runs(worker.pid):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return


def _runs(group: int) -> bool:
    """Whether any process of a group still runs; a zombie, whose exit code is unread, does not."""
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
