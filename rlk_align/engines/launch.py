"""Starts an engine's ranks through torchrun, and says which of them failed, and how."""

import signal
import socket
import sys
from pathlib import Path

from rlk_align.engines.job import Events, last_lines
from rlk_align.errors import EngineFailed


def launch(job_path: Path, engine: str, world: int, port: int | None, events: Events) -> None:
    """Runs this worker's job once more in each of `world` ranks; returns when all are done.

    `port`: where the ranks meet, on 127.0.0.1; None is a free one. Raises EngineFailed where a
    rank ended before its work was done, unless that rank has told its error itself.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    if port is not None:
        _check_free(port)
    arguments = [
        f"--nproc-per-node={world}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port or 0}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "-m",
        "rlk_align.engines.worker",
        str(job_path),
    ]
    try:
        run(get_args_parser().parse_args(arguments))
    except ChildFailedError as error:
        if not events.told():
            raise _failure(error, engine, world, job_path.parent) from error
        sys.exit(EngineFailed.exit_code)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineFailed(
                f"port {port}, at which the ranks were to meet, is taken: {error}",
                "leave `port` out of the engine spec: a free one is then found",
            ) from error


def _failure(error: object, engine: str, world: int, folder: Path) -> EngineFailed:
    """The rank to blame: one that a signal ended goes before those that then lost it."""
    failures = sorted(
        error.failures.values(),  # type: ignore[attr-defined]
        key=lambda f: (f.exitcode >= 0, f.timestamp),
    )
    failed = [f for f in failures if f.exitcode != -signal.SIGTERM] or failures
    rank, log = failed[0].global_rank, rank_log(folder, failed[0].global_rank)
    return EngineFailed(
        f"rank {rank} of {world} of {engine} {death(failed[0].exitcode)}; its last lines:\n"
        + "\n".join(last_lines(log)),
        f"the whole log: {log}; finished passes are kept, and a rerun goes on from there",
    )


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
