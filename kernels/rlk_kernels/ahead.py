"""Compiling kernels before they are needed, several at a time.

Triton compiles a kernel at its first launch, one after the other: a minute of a slow host for those
of an engine. `compiled_ahead` takes the same launches first, runs none of them, and hands what is
to be compiled to threads: most of the work is the compiler's, outside of the interpreter's lock.
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
    """While it lasts, `launching.launch` compiles and runs nothing: outputs are left as they were.
    At its end all is compiled. False, and launches as ever, where there is nothing to gain: no GPU,
    or a graph that is captured."""
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
