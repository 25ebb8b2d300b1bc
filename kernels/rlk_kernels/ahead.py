"""Compiling kernels before they are needed, several at a time.

Triton compiles each kernel at its first launch, one after another; on a slow host the kernels of an
engine take a minute. `compiled_ahead` makes the same launches without running them, and compiles
their kernels in threads, or, if the caller does not wait for them, in processes
(`compile_server.py`).
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from rlk_kernels.compile_server import CompileServer
from rlk_kernels.device import interpreting
from rlk_kernels.launching import only_compiling
from rlk_kernels.private_api import compiling_in, stop_submitting

MOST_THREADS = 16
_thread = threading.local()
"""`pool`: the threads that compile for the present one in `compiled_ahead`."""


def submit(make: Callable, *arguments) -> "Future[Any]":
    """`make(*arguments)`, by a thread in `compiled_ahead`, and otherwise at once."""
    pool = getattr(_thread, "pool", None)
    if pool is not None:
        return pool.submit(make, *arguments)
    result: Future[Any] = Future()
    result.set_result(make(*arguments))
    return result


@contextmanager
def compiled_ahead(device: torch.device, wait: bool = True) -> Iterator[bool]:
    """A context in which `launching.launch` compiles kernels and does not run them, so that outputs
    keep their values. All kernels are compiled at its end. Without `wait` processes continue to
    compile; a launch waits for its own kernel, and `finish` for all. Without a GPU, and while a
    graph is captured, it yields False and launches as usual."""
    if device.type != "cuda" or interpreting() or torch.cuda.is_current_stream_capturing():
        yield False
        return
    with _waiting() if wait else _going_on() as threads:
        _thread.pool = threads
        try:
            with only_compiling():
                yield True
        finally:
            _thread.pool = None


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))


@contextmanager
def _waiting() -> Iterator[Executor]:
    with _threads() as threads, compiling_in(threads):
        yield threads


class _Background(Executor):
    """Threads that wait for a server's processes, and load the compiled kernels."""

    def __init__(self) -> None:
        self.threads, self.server = _threads(), CompileServer()

    def submit(self, make: Callable, /, *arguments: Any, **options: Any) -> "Future[Any]":
        return self.threads.submit(self._make, make, *arguments, **options)

    def _make(self, make: Callable, *arguments: Any, **options: Any) -> Any:
        self.server.compile(make)
        return make(*arguments, **options)


_background = functools.cache(_Background)
_unfinished: list[AbstractContextManager] = []


@contextmanager
def _going_on() -> Iterator[Executor]:
    compiling = compiling_in(_background())
    compiling.__enter__()
    _unfinished.append(compiling)
    try:
        yield _background()
    finally:
        stop_submitting()


def finish() -> None:
    """Waits for all kernels that `compiled_ahead` did not wait for; raises the error of a failed
    compilation."""
    try:
        while _unfinished:
            _unfinished.pop().__exit__(None, None, None)
    finally:
        _background().server.end()
