"""A program: what is launched again is what Triton would launch, on an H200 that is not there.

Every operator is called thrice at shapes that differ in what Triton looks at. Triton chooses the
variant of a kernel as it always does, but compiles none. Prints the kernels that were launched
again, and those of which another variant was. With `--fault`, what is kept is shared by all shapes.
Not under TRITON_INTERPRET, so in a process of its own, with kernels/ and scripts/ on its path
(`test_launched_again.py`).
"""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import rlk_kernels as rk
import torch
from offline_h200 import h200
from rlk_kernels import launching
from rlk_kernels.matmul import self_check
from triton.runtime.jit import JITFunction

HALF, FULL, LONG = torch.bfloat16, torch.float32, torch.int64


def empty(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def integers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def paged(sequences: int, pages: int, heads: int, kv_heads: int, dim: int) -> None:
    cache, bounds = empty(64, 16, kv_heads, dim), integers(sequences + 1)
    tables = integers(sequences, pages), integers(sequences)
    rk.paged_attention(empty(sequences, heads, dim), cache, cache, *tables, cu_seqlens_q=bounds)


def calls(m: int, h: int, v: int) -> Iterator[Callable[[], object]]:
    """Operators on m rows; tensors are made anew, as they are between an engine's steps."""
    x, head, bias, ids = empty(m, h), empty(v, h), empty(v), empty(m, dtype=LONG)
    ones, mask = empty(1, dtype=FULL), empty(1, m, dtype=FULL)
    cu, q, k = integers(2), empty(m, 8, 128), empty(m, 2, 128)
    yield lambda: rk.linear(x, head, out_dtype=FULL)
    yield lambda: rk.rms_norm(x, empty(h), 1e-6, residual=x)
    yield lambda: rk.attention(q, k, k, cu, cu, window=100)
    yield lambda: rk.logp(empty(m, v), ids, top_k=3)
    yield lambda: rk.linear_logp(x, head, ids)
    yield lambda: rk.linear_logp(x, head, ids, return_lse=True, return_entropy=True)
    yield lambda: rk.linear_logp(x, head, ids, softcap=30.0, logit_scale=0.5, bias=bias)
    yield lambda: rk.linear_logp(x, head, ids, token_ids=empty(m, 5, dtype=LONG))
    yield lambda: rk.linear_grpo_loss(x[None], head, ids[None], None, ones, mask)
    for sequences in {1, m}:
        for pages in (64, 2560):
            yield lambda b=sequences, n=pages: paged(b, n, 32, 8, 128)
            yield lambda b=sequences, n=pages: paged(b, n, 6, 6, 80)


def main(fault: bool) -> int:
    asked, other, run = set(), set(), JITFunction.run

    def choose(kernel, *arguments, **options):
        return run(kernel, *arguments, **{**options, "warmup": True})

    def choice(kernel, key, signature, device, *_):
        wrapper = SimpleNamespace(global_scratch_size=1)
        made = SimpleNamespace(packed_metadata=(), function=0, name=kernel.__name__, run=wrapper)
        kernel.device_caches[device][0][key] = made
        return made

    def again(found, kernel, grid, arguments, options, addressed):
        asked.add(kernel.__name__)
        if kernel[grid](*arguments, **options) is not found.kernel:
            other.add(kernel.__name__)

    with (
        h200(),
        mock.patch.object(JITFunction, "run", choose),
        mock.patch.object(JITFunction, "_do_compile", choice),
        mock.patch.object(launching, "again", again),
        mock.patch.object(self_check, "holds", return_value=True),
        mock.patch("torch._C._cuda_getDevice", return_value=0, create=True),
        mock.patch("torch.cuda.current_device", return_value=0),
        torch.no_grad(),
    ):
        if fault:
            from rlk_kernels.ops.linear_logp import launch

            mock.patch.object(launch, "launches", return_value={}).start()
        for m, h, v in ((1, 256, 5000), (16, 1024, 16384), (33, 1024, 16384), (300, 1000, 1023)):
            for call in calls(m, h, v):
                for _ in range(3):
                    call()
    print("again:", *sorted(asked))
    print("other:", *sorted(other))
    return int(bool(other) or not asked)


if __name__ == "__main__":
    sys.exit(main("--fault" in sys.argv))
