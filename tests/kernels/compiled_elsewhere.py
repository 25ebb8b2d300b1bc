"""A program: kernels are compiled by a server for an H200 that is not there. Prints which the
server has tried, which of them this process found in the cache, and which it compiled itself.

`--dies`: the server is killed as soon as it was started; `--later`: when it compiles. Then kernels
are left out that take long to compile. Not under TRITON_INTERPRET, so in a process of its own
(`test_compiled_ahead.py`); TRITON_CACHE_DIR has to be empty."""

import sys
import time
from pathlib import Path
from subprocess import Popen
from threading import Thread
from typing import Any
from unittest import mock

import rlk_kernels as rk
import torch
import triton
from offline_h200 import GPU, h200
from replayed_launches import empty, integers
from rlk_kernels import ahead, compile_server
from triton.runtime.jit import JITFunction

found: list[str] = []
compiled: list[str] = []
tried: list[str] = []
_run = JITFunction.run


def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
    (found if cache_hit else compiled).append(src.name)


def killed(command: list[str], **options: Any) -> Popen:
    process = Popen(command, **options)
    if command[0] == sys.executable:  # not an assembler
        if "--later" in sys.argv:
            Thread(target=kill_at_work, args=[process]).start()
        else:
            process.kill()
    return process


def kill_at_work(server: Popen) -> None:
    """Kills a server as soon as it has a process that compiles."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    server.kill()


class Watched(compile_server.CompileServer):
    def compile(self, compile_kernel: Any) -> None:
        super().compile(compile_kernel)
        tried.append("one")


def main() -> int:
    dies = bool({"--dies", "--later"} & set(sys.argv))
    knobs = triton.knobs.compilation
    with (
        h200(),
        torch.no_grad(),
        mock.patch.object(JITFunction, "run", _run),
        mock.patch.object(knobs, "always_compile", False),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", False),
        mock.patch.object(knobs, "listener", listen),
        mock.patch.object(compile_server.subprocess, "Popen", killed if dies else Popen),
        mock.patch.object(ahead, "CompileServer", Watched),
    ):
        with ahead.compiled_ahead(GPU, wait=False):
            rk.rms_norm(empty(4, 256), empty(256), 1e-6)
            rk.swiglu(empty(4, 256), empty(4, 256))
            if not dies:
                q, k, ends = empty(64, 8, 128), empty(64, 2, 128), integers(2)
                rk.attention(q, k, k, ends, ends)
        ahead.finish()
    print("tried:", len(tried))
    print("found:", *sorted(found))
    print("compiled:", *sorted(compiled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
