"""Compiling kernels before they are needed, several at a time.

Triton compiles each kernel at its first launch, one after another: on a slow host an engine's
kernels take a minute. `compiled_ahead` takes the same launches without running them, and compiles
in threads: most of the work is the compiler's, outside of the interpreter's lock.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from rlk_kernels.device import interpreting
from rlk_kernels.launching import only_compiling
from rlk_kernels.private_api import compiling_in

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
def compiled_ahead(device: torch.device) -> Iterator[bool]:
    """A context in which `launching.launch` compiles and runs nothing: outputs keep their values.
    At its end everything is compiled. Yields False, and launches as usual, where it cannot help:
    without a GPU, or while a graph is captured."""
    if device.type != "cuda" or interpreting() or torch.cuda.is_current_stream_capturing():
        yield False
        return
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    with threads, compiling_in(threads):
        _thread.pool = threads
        try:
            with only_compiling():
                yield True
        finally:
            _thread.pool = None
