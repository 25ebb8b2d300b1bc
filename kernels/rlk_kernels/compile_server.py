"""Compiling kernels of Triton in other processes.

Before LLVM and ptxas, Triton's compiler runs in Python: threads of one process compile hardly
faster than one thread, and delay the thread that loads a model. A server imports Triton once and
forks processes that compile. The results lie in Triton's cache on disk, where the process that
asked finds them. A server that does not start, or dies, costs time alone: kernels that it did not
compile are compiled where they are needed.
"""

import contextlib
import ctypes
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe

from rlk_kernels.compile_request import from_text, to_text
from rlk_kernels.private_api import asked_to_compile

MOST_PROCESSES = 16
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""
END = b""
"""The message that ends a server."""


class CompileServer:
    """A server as the asking process sees it: started by the first kernel that it compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._tried: dict[int, threading.Event] = {}
        self._numbers = itertools.count()
        self._failed = False

    def compile(self, compile_kernel: Callable) -> None:
        """Wait until the server has tried to compile what a function that Triton gives to the
        threads of `compiling_in` would compile. If it failed, the cache does not have the kernel.
        Returns at once if the cache has it, or if no server can compile it."""
        asked = asked_to_compile(compile_kernel)
        if asked is None:
            return
        src, target, options = asked
        form = type(src), src.fn, src.signature, src.constants, src.attrs
        where = {k: v for k, v in os.environ.items() if k.startswith("TRITON")}
        try:
            request = to_text(where, form, target, options).encode()
        except TypeError:
            return
        tried, number = threading.Event(), next(self._numbers)
        with self._lock:
            if self._failed:
                return
            try:
                connection = self._connection or self._start()
                connection.send_bytes(b"%d %b" % (number, request))
            except OSError:
                self._failed = True
                return
            self._tried[number] = tried
        tried.wait()

    def end(self) -> None:
        """End the server, of which nobody expects a kernel; the next kernel starts another one."""
        with self._lock, contextlib.suppress(OSError):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.send_bytes(END)

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",  # compiling needs no GPU, and must not take memory of one
        }
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as s; s.serve({theirs.fileno()})"],
                env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        threading.Thread(
            target=self._receive, args=[self._connection, process], daemon=True
        ).start()
        return self._connection

    def _receive(self, connection: Connection, process: subprocess.Popen) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                number = int(connection.recv_bytes())
                with self._lock:
                    self._tried.pop(number).set()
        process.wait()
        with self._lock:
            if self._connection is connection:  # it has died
                self._failed = True
                for tried in self._tried.values():
                    tried.set()


def _compile(request: str) -> None:
    from triton.compiler import compile as compile_kernel

    where, (kind, *form), target, options = from_text(request)
    os.environ.update(where)
    compile_kernel(kind(*form), target=target, options=options)


def _begin(handle: int) -> None:
    """A process that compiles ends with its server, and keeps no end of its connection: otherwise
    the asking process would never learn that the server has died."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.close(handle)


def serve(handle: int) -> None:
    """Compile what is asked for through a connection, several requests at a time, until END or
    until the asking process is gone. handle: of the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asking process's to answer
    importlib.import_module("triton.experimental.gluon")  # once, before the processes are forked

    connection, replying = Connection(handle), threading.Lock()

    def reply(number: bytes, _: Future) -> None:
        with replying, contextlib.suppress(OSError):
            connection.send_bytes(number)

    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("fork"), _begin, (handle,)) as pool:
        with contextlib.suppress(EOFError):
            while message := connection.recv_bytes():
                number, _, request = message.partition(b" ")
                tried = pool.submit(_compile, request.decode())
                tried.add_done_callback(partial(reply, number))
        pool.shutdown(cancel_futures=True)
