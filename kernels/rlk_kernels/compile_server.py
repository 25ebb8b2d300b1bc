"""Compiles kernels of Triton in other processes.

Before LLVM and ptxas, Triton's compiler runs in Python, so threads of one process compile hardly
faster than one thread, and delay the thread that loads a model. A server imports Triton once and
forks processes that compile. The requesting process finds the results in Triton's cache on disk. If
the server does not start, or dies, the kernels are compiled when they are needed.
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
"""Linux's PR_SET_PDEATHSIG."""
END = b""
"""The message that ends a server."""


class CompileServer:
    """The requesting process's end of a server, which starts with the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._tried: dict[int, threading.Event] = {}
        self._numbers = itertools.count()
        self._failed = False

    def compile(self, compile_kernel: Callable) -> None:
        """Waits until the server has tried to compile a kernel. compile_kernel: the function that
        Triton gives to the threads of `compiling_in`. If the server fails, the cache does not have
        the kernel. Returns at once if the cache has the kernel, or if no server can compile it."""
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
        """Ends the server when no request is open. The next request starts another server."""
        with self._lock, contextlib.suppress(OSError):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.send_bytes(END)

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",  # compiling needs no GPU, and must not use its memory
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
            if self._connection is connection:  # the server has died
                self._failed = True
                for tried in self._tried.values():
                    tried.set()


def _compile(request: str) -> None:
    from triton.compiler import compile as compile_kernel

    where, (kind, *form), target, options = from_text(request)
    os.environ.update(where)
    compile_kernel(kind(*form), target=target, options=options)


def _begin(handle: int) -> None:
    """Makes a compiling process end with its server, and closes its copy of the server's
    connection, which would keep the requesting process from learning that the server has died."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.close(handle)


def serve(handle: int) -> None:
    """Compiles the requests of a connection, several at a time, until END or until the requesting
    process has ended. handle: the connection's file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requesting process handles Ctrl-C
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
