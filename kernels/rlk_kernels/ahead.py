"""Compiling kernels before they are needed, several at a time.

Triton compiles each kernel at its first launch, one after another: on a slow host an engine's
kernels take a minute. `compiled_ahead` takes the same launches without running them, and compiles
in threads; if nothing waits for these, in processes (`compile_server.py`).
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
"""`pool`: the threads that compile for this one while `compiled_ahead` lasts."""


def submit(make: Callable, *arguments) -> "Future[Any]":
    """`make(*arguments)`: by a thread of `compiled_ahead` while that lasts, else at once."""
    pool = getattr(_thread, "pool", None)
    if pool is not None:
        return pool.submit(make, *arguments)
    result: Future[Any] = Future()
    result.set_result(make(*arguments))
    return result


@contextmanager
def compiled_ahead(device: torch.device, wait: bool = True) -> Iterator[bool]:
    """A context in which `launching.launch` compiles and runs nothing: outputs keep their values.
    At its end everything is compiled; without `wait` processes go on compiling, and a launch waits
    for its own kernel (`finish` for all). Yields False, and launches as usual, where it cannot
    help: without a GPU, or while a graph is captured."""
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
    """Threads that wait for a server's processes, and load what these have compiled."""

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
    """Wait until all is compiled that `compiled_ahead` did not wait for; raises what failed."""
    try:
        while _unfinished:
            _unfinished.pop().__exit__(None, None, None)
    finally:
        _background().server.end()
