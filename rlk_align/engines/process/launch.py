"""Starts an engine's ranks through torchrun, and says which of them failed, and how."""

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
    """Runs this worker's job once more in each of the engine's ranks; returns when all are done.

    They meet on 127.0.0.1, at the spec's `port` or at a free one. Raises the error of the rank
    that failed first, or EngineFailed where that rank ended without a word.
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
        # What an earlier run has closed may be used again, as the ranks themselves do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineFailed(
                f"port {port}, at which the ranks should meet, is in use: {error}",
                "leave `port` out of the engine spec: a free one is then found",
            ) from error
        except OverflowError as error:
            raise BadOption(f"port={port} is not a port", "choose one from 1 to 65535") from error


def first_failure(
    codes: Mapping[int, int], errors: list[dict], spec: EngineSpec, folder: Path
) -> RlkError:
    """The error of the rank to blame: the others failed because they lost that rank.

    `codes`: exit codes of the ranks that failed; `errors`: the errors that ranks reported, in
    order. A rank that ended without a report was killed, before the others reported that they lost
    it. Torchrun itself ends the ranks that are left with SIGTERM.
    """
    reported = {e["rank"] for e in errors}
    silent = [r for r, code in codes.items() if r not in reported and code != -signal.SIGTERM]
    if errors and not silent:
        return error_of(errors[0])
    rank = (silent or list(codes))[0]
    return failed(
        f"rank {rank} of {spec.ranks} of {spec} {death(codes[rank])}", rank_log(folder, rank)
    )


_PATIENCE = 1.0
"""Seconds within which a rank that is lost has ended."""


@contextmanager
def children_watched(spec: EngineSpec, folder: Path) -> Iterator[None]:
    """Raises EngineFailed for a rank that the engine itself started and that was killed, instead of
    the engine's own report of the loss."""
    children = multiprocessing.active_children()
    ended: list[BaseProcess] = []
    try:
        with _ends_noted(children, ended):
            try:
                yield
            except Exception:
                # An engine may report the loss of a rank before the rank has been waited for.
                for child in children:
                    child.join(_PATIENCE)
                raise
    except Exception as error:
        # The engine may have killed the others by now: the first to end is the one to blame.
        killed = [c for c in ended if c.exitcode not in (None, 0, -signal.SIGTERM)]
        if not killed:
            raise
        ranks = {p.pid: p.name for p in heartbeats(folder / HEARTBEATS)}
        child = killed[0]
        who = ranks.get(child.pid or 0, child.name)
        what = f"{who} of {len(children)} of {spec} {death(child.exitcode or 0)}"
        raise failed(what, folder / "worker.log", pid=child.pid) from error


@contextmanager
def _ends_noted(children: Sequence[BaseProcess], ended: list[BaseProcess]) -> Iterator[None]:
    """Adds each child that ends to `ended`, in the order in which they do."""
    running = {c.sentinel: c for c in children}
    leaving, leave = multiprocessing.Pipe(duplex=False)

    def note() -> None:
        ready: Collection[object] = ()
        while running and leaving not in ready:
            ready = wait([*running, leaving])
            ended.extend(running.pop(s) for s in ready if isinstance(s, int))

    noting = threading.Thread(target=note, daemon=True)
    noting.start()
    with leaving:
        try:
            yield
        finally:
            leave.close()
            noting.join()


def rank_log(folder: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return folder / f"rank{rank}.log"


def death(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
