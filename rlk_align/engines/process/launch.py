"""Starts an engine's ranks through torchrun, and reports which rank failed and how."""

import multiprocessing
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rlk_align.engines.process.heartbeat import HEARTBEATS, heartbeats
from rlk_align.engines.process.job import Events, error_of, failed
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, EngineFailed, RlkError


def launch(job_path: Path, spec: EngineSpec, events: Events) -> None:
    """Runs this worker's job in each of the engine's ranks; returns when all are done.

    The ranks connect through 127.0.0.1, at the spec's `port` or at a free one. Raises the error of
    the rank that failed first, or EngineFailed if that rank ended without a report.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    port = int(spec.option("port") or 0)
    if port:
        _check_free(port)
    arguments = [
        f"--nproc-per-node={spec.ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "-m",
        "rlk_align.engines.worker",
        str(job_path),
    ]
    try:
        run(get_args_parser().parse_args(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        errors = [e for e in events.unread() if "error" in e]
        raise first_failure(codes, errors, spec, job_path.parent) from error


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # A port that an earlier run has closed is free, as it is for the ranks.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineFailed(
                f"port {port}, which the ranks need to connect, is in use: {error}",
                "leave `port` out of the engine spec, and a free port is chosen",
            ) from error
        except OverflowError as error:
            raise BadOption(f"port={port} is not a port", "choose one from 1 to 65535") from error


def first_failure(
    codes: Mapping[int, int], errors: list[dict], spec: EngineSpec, folder: Path
) -> RlkError:
    """The error of the rank to blame; the others failed because they lost that rank.

    `codes`: exit codes of the ranks that failed; `errors`: the errors that ranks reported, in
    order. A rank that ended without a report was killed before the others reported that they lost
    it. Torchrun itself ends the remaining ranks with SIGTERM.
    """
    reported = {e["rank"] for e in errors}
    silent = [r for r, code in codes.items() if r not in reported and code != -signal.SIGTERM]
    if errors and not silent:
        return error_of(errors[0])
    rank = (silent or list(codes))[0]
    return failed(
        f"rank {rank} of {spec.ranks} of {spec} {death(codes[rank])}", rank_log(folder, rank)
    )


_GRACE = 1.0
"""Seconds in which the exit of a lost rank becomes visible."""


@contextmanager
def children_watched(spec: EngineSpec, folder: Path) -> Iterator[None]:
    """If a rank that the engine itself started was killed, raises EngineFailed for that rank
    instead of the engine's own error."""
    children = multiprocessing.active_children()
    ended: list[BaseProcess] = []
    try:
        with _exits_recorded(children, ended):
            try:
                yield
            except Exception:
                # An engine may report the loss of a rank before the rank's exit is visible.
                for child in children:
                    child.join(_GRACE)
                raise
    except Exception as error:
        # The engine may have killed the others by now: the first rank that ended is to blame.
        killed = [c for c in ended if c.exitcode not in (None, 0, -signal.SIGTERM)]
        if not killed:
            raise
        ranks = {p.pid: p.name for p in heartbeats(folder / HEARTBEATS)}
        child = killed[0]
        name = ranks.get(child.pid or 0, child.name)
        what = f"{name} of {len(children)} of {spec} {death(child.exitcode or 0)}"
        raise failed(what, folder / "worker.log", pid=child.pid) from error


@contextmanager
def _exits_recorded(children: Sequence[BaseProcess], ended: list[BaseProcess]) -> Iterator[None]:
    """Adds each child that ends to `ended`, in the order of their exits."""
    running = {c.sentinel: c for c in children}
    stopped, stop = multiprocessing.Pipe(duplex=False)

    def record() -> None:
        ready: Collection[object] = ()
        while running and stopped not in ready:
            ready = wait([*running, stopped])
            ended.extend(running.pop(s) for s in ready if isinstance(s, int))

    recording = threading.Thread(target=record, daemon=True)
    recording.start()
    with stopped:
        try:
            yield
        finally:
            stop.close()
            recording.join()


def rank_log(folder: Path, rank: int) -> Path:
    """The log of a rank's output."""
    return folder / f"rank{rank}.log"


def death(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    hint = ", which the system sends when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
