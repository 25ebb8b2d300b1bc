"""A program: two kernels are compiled by threads for an H200 that is not there, while the program
goes on. Prints how many were submitted, what was compiled before the program asked for it, and how
many were there at the end. Not under TRITON_INTERPRET, so in a process of its own
(`test_compiled_ahead.py`)."""

import sys
import threading

import rlk_kernels as rk
import torch
from offline_h200 import GPU, h200
from replayed_launches import empty
from rlk_kernels import ahead


def main() -> int:
    may_end = threading.Event()
    for _ in range(ahead.MOST_THREADS):  # none is left for the kernels
        ahead._background().submit(may_end.wait, 60)
    with h200(), torch.no_grad():
        with ahead.compiled_ahead(GPU, wait=False):
            x = empty(4, 256)
            rk.rms_norm(x, empty(256), 1e-6)
            rk.swiglu(x, empty(4, 256))
        [unfinished] = ahead._unfinished
        futures = list(unfinished.raw_futures)
        early = [f for f in futures if f.done()]
        may_end.set()
        ahead.finish()
        compiled = [f.result() for f in futures if f.done()]
    print("submitted:", len(futures))
    print("early:", *early)
    print("done:", sum("cubin" in kernel.asm for kernel in compiled))
    return int(len(compiled) != 2)


if __name__ == "__main__":
    sys.exit(main())
