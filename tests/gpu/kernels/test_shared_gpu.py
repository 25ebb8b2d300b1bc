"""On a GPU that three processes share: each operator has the bits of its first call in all calls.

A driver takes a program off the GPU for another process, and puts it back. So that this happens
inside of kernels, each process queues some milliseconds of work before it waits.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

PROCESSES, SECONDS, QUEUED = 3, 4.0, 20
SHORT = (
    [38] * 8 + [20] * 8 + [33] * 8 + [22] * 8 + [37] * 8 + [34] * 8 + [53] * 8 + [22] * 8 + [488]
)
"""Tokens of packed sequences: in a pack like this, gradients of keys were NaN."""
Call = Callable[[], tuple[torch.Tensor, ...]]


def calls() -> dict[str, Call]:
    import rlk_kernels as rk
    from rlk_kernels.ops.attention import backward
    from rlk_kernels.ops.attention.call import AttentionCall

    g = torch.Generator("cuda").manual_seed(1)
    tokens = sum(SHORT)
    cu = torch.tensor([0, *SHORT], device="cuda").cumsum(0).int()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=g).bfloat16()

    def attention(dim: int) -> tuple[Call, Call]:
        q, k, v, do = (normal(tokens, heads, dim) for heads in (16, 8, 8, 16))
        out, lse = rk.attention(q, k, v, cu, cu, return_lse=True)
        call = AttentionCall(q, k, v, cu, cu, None, True, dim**-0.5, None, out=out)
        return (
            lambda: rk.attention(q, k, v, cu, cu, return_lse=True),
            lambda: backward.backward(call, lse, do)[:3],
        )

    def gradients(operator: Callable, *inputs: torch.Tensor) -> Call:
        leaves = [x.requires_grad_() for x in inputs]
        upstream = torch.randn_like(operator(*leaves))

        def run() -> tuple[torch.Tensor, ...]:
            out = operator(*leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, upstream)

        return run

    ids = torch.randint(0, 32000, (tokens,), device="cuda", generator=g)
    every: dict[str, Call] = {}
    for dim in (64, 128):
        names = f"attention {dim}", f"attention {dim}, gradients"
        every |= dict(zip(names, attention(dim), strict=True))
    return every | {
        "linear": gradients(rk.linear, normal(tokens, 1024), normal(6144, 1024)),
        "linear, few rows": gradients(rk.linear, normal(64, 4096), normal(4096, 4096)),
        "linear_logp": gradients(
            lambda h, w: rk.linear_logp(h, w, ids), normal(tokens, 1024), normal(32000, 1024)
        ),
        "rms_norm": gradients(
            lambda x, w: rk.rms_norm(x, w, eps=1e-6), normal(tokens, 1024), normal(1024)
        ),
        "swiglu": gradients(rk.swiglu, normal(tokens, 3072), normal(tokens, 3072)),
        "embedding": gradients(lambda w: rk.embedding(ids, w), normal(32000, 1024)),
    }


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def count_differences(seconds: float) -> dict[str, tuple[int, int]]:
    """By operator: (tensors that differed, calls)."""
    every = calls()
    first = {name: [x.clone() for x in run()] for name, run in every.items()}
    torch.cuda.synchronize()
    counts = {}
    for name, run in every.items():
        end, differing, done = time.monotonic() + seconds, 0, 0
        while time.monotonic() < end:
            other = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(QUEUED):
                for x, expected in zip(run(), first[name], strict=True):
                    other += (bits(x) != bits(expected)).any()
            differing, done = differing + int(other), done + QUEUED
        counts[name] = differing, done
    return counts


def test_no_call_differs_where_three_processes_share_a_gpu():
    path = [sys.executable, str(Path(__file__).resolve())]
    running = [subprocess.Popen(path, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    for process in running:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        counts = json.loads(said.splitlines()[-1])
        assert len(counts) == len(calls())
        for name, (differing, done) in counts.items():
            assert done > 0, name
            assert differing == 0, f"{name}: {differing} tensors differ in {done} calls"


if __name__ == "__main__":
    print(json.dumps(count_differences(SECONDS)))
