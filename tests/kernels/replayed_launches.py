"""A program: what is launched again is what Triton would launch, on an H200 that is not there.

Every operator is called thrice at shapes that differ in what Triton looks at. Triton chooses the
variant of a kernel as it always does, but compiles none. Prints the kernels that were launched
again, and those of which another variant was; then those that `launching.replay_or_run` would
launch, and those that it would launch with other arguments than the call's own code; then the
places of its keys (its function, position) without which nothing would have differed. Memory lies
at one of two addresses. With `--fault`, all shapes share a cache; with `--short-keys`, calls are
recorded without their numbers; such a fault shows before tensors lie elsewhere, which ends it.
Not under TRITON_INTERPRET, so in a process of its own, with kernels/ and tests/support/ on its path
(`tests/compiled/test_replayed_launches.py`).
"""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import offline_h200
import rlk_kernels as rk
import torch
from offline_h200 import h200
from rlk_kernels import launching, private_api
from rlk_kernels.launching import ShapeCache
from rlk_kernels.matmul import self_check
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.linear_logp import launch as logp_launch
from rlk_kernels.ops.linear_logp.options import options_of
from triton.runtime.jit import JITFunction

HALF, FULL, LONG = torch.bfloat16, torch.float32, torch.int64


def empty(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def integers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def paged(sequences: int, pages: int, heads: int, kv_heads: int, dim: int) -> None:
    caches = [empty(64, 16, kv_heads, dim) for _ in range(2)]
    tables, bounds = (integers(sequences, pages), integers(sequences)), integers(sequences + 1)
    arguments, pieces = (empty(sequences, heads, dim), *caches, *tables), integers(1)
    for more in ({}, {"scale": 0.3}, {"softcap": 20.0}, {"softcap": 30.0}, {"window": 40}):
        rk.paged_attention(*arguments, cu_seqlens_q=bounds, **more)
    schedule = rk.paged_schedule(*arguments, cu_seqlens_q=bounds)
    if schedule is not None:  # in memory of its own, so that each address counts
        schedule = replace(schedule, pieces=pieces)
    rk.paged_attention(*arguments, cu_seqlens_q=bounds, schedule=schedule)


def rows(m: int, h: int, ids: torch.Tensor) -> Iterator[Callable[[], object]]:
    """Operators that work row by row, on dense rows and on parts of wider ones."""
    slots, caches = integers(m), empty(9, 16, 2, 256)
    for dense in (True, False):
        qkv = empty(m, 12, 128)
        q, k = (x.contiguous() if dense else x for x in (qkv[:, :8], qkv[:, 8:10]))
        gate, up = (x.contiguous() if dense else x for x in empty(m, 2 * h).chunk(2, -1))
        for eps in (1e-6, 1e-5):
            yield lambda x=gate, eps=eps: rk.rms_norm(x, empty(h), eps, cast="vllm")
            yield lambda x=gate, r=up, eps=eps: rk.norm_add_norm(
                x, r, empty(h), empty(h, dtype=FULL), eps, cast="vllm"
            )
            yield lambda q=q, k=k, eps=eps: rk.norm_rope(
                q, k, empty(128), empty(128), ids, eps=eps, theta=1e6
            )
        yield lambda q=q, k=k: rk.rope(q, k, ids, theta=1e6)
        yield lambda x=gate, y=up: rk.swiglu(x, y, activation="gelu_tanh")
        yield lambda k=k: rk.write_kv_cache(k, k, *caches.split(128, -1), slots)


def calls(m: int, h: int, v: int) -> Iterator[Callable[[], object]]:
    """Operators on m rows; tensors are made anew, as they are between an engine's steps."""
    x, head, bias, ids = empty(m, h), empty(v, h), empty(v), empty(m, dtype=LONG)
    ones, mask = empty(1, dtype=FULL), empty(1, m, dtype=FULL)
    cu, q, k = integers(2), empty(m, 8, 128), empty(m, 2, 128)
    yield lambda: rk.linear(x, head, out_dtype=FULL)
    yield lambda: rk.rms_norm(x, empty(h), 1e-6, residual=x)
    yield from rows(m, h, ids)
    yield lambda: rk.attention(q, k, k, cu, cu, window=100)
    yield lambda: rk.logp(empty(m, v), ids, top_k=3)
    yield lambda: rk.linear_logp(x, head, ids)
    yield lambda: rk.linear_logp(x, head, ids, return_lse=True, return_entropy=True)
    yield lambda: rk.linear_logp(x, head, ids, softcap=30.0, logit_scale=0.5, bias=bias)
    yield lambda: rk.linear_logp(x, head, ids, temperature=0.7)
    yield lambda: rk.linear_logp(x, head, ids, token_ids=empty(m, 5, dtype=LONG))
    yield lambda: rk.linear_grpo_loss(x[None], head, ids[None], None, ones, mask)
    for sequences in {1, m}:
        for pages in (64, 2560):
            yield lambda b=sequences, n=pages: paged(b, n, 32, 8, 128)
            yield lambda b=sequences, n=pages: paged(b, n, 6, 6, 80)


def moved(memory: "Memory") -> None:
    """Calls whose tensors lie elsewhere each time."""
    for _ in range(150):
        memory.addresses.clear()
        arguments = empty(16, 256), empty(16384, 256), empty(16384), empty(16, dtype=LONG)
        for run, *more in ((logp_launch.forward,), (logp_launch.forward_inference, 3)):
            run(*arguments, options_of(FULL, 0.0, 1.0, 1.0), True, *more)
        for sequences in (4, 80):
            paged(sequences, 2560, 32, 8, 128)


class Memory:
    """Where tensors lie: each storage at one of two addresses."""

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self.random = random.Random(0)

    def data_ptr(self, x: torch.Tensor) -> int:
        if x.numel() == 0:
            return 0
        storage = x.untyped_storage()._cdata
        if storage not in self.addresses:
            self.addresses[storage] = self.random.randint(1, 2) << 32
        return self.addresses[storage] + x.storage_offset() * x.element_size()


def said(x: object) -> object:
    """An argument as a launch takes it."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr(), x.dtype
    if hasattr(x, "block_shape"):
        return x.base.data_ptr(), tuple(x.shape), tuple(x.strides), tuple(x.block_shape)
    return x


class Sequences:
    """In place of `launching.replay_or_run`: every call runs, and its launches are held to those
    of its key before, and of its key without each of its places."""

    def __init__(self, short_keys: bool) -> None:
        self.short_keys = short_keys
        self.launched: list[tuple] = []
        self.recorded: dict[tuple, list[tuple]] = {}
        self.relaunched: set[str] = set()
        self.differ: set[str] = set()
        self.places: dict[tuple[str, int], bool] = {}

    def replay_or_run(
        self, cache: ShapeCache, memory: tuple, numbers: tuple, run: Callable[..., None], *arguments
    ) -> None:
        key = tuple(0 if x is None else x.data_ptr() for x in memory)
        if not self.short_keys:
            key += numbers
        self.launched = []
        run(cache, *arguments)
        names = {name for name, *_ in self.launched}
        other = self.differing(id(cache), key)
        if other is not None:
            self.relaunched |= names
            self.differ |= other
        for i in range(len(key)):
            place = run.__name__, i
            other = self.differing(id(cache), i, key[:i], key[i + 1 :])
            self.places[place] = self.places.get(place, False) or bool(other)

    def differing(self, *key) -> set[str] | None:
        """Kernels launched otherwise than before with this key; None where there is no before."""
        before = self.recorded.get(key)
        if before is None or len(before) < len(self.launched):
            self.recorded[key] = self.launched  # those before were not all launched again
        elif len(before) == len(self.launched):
            return {a[0] for a, b in zip(before, self.launched, strict=True) if a != b}
        return None


def main(fault: bool, short_keys: bool) -> int:
    asked, other, run, sequences = set(), set(), JITFunction.run, Sequences(short_keys)
    memory = Memory()

    def choose(kernel, *arguments, **options):
        return run(kernel, *arguments, **{**options, "warmup": True})

    def choice(kernel, key, signature, device, *_):
        wrapper = SimpleNamespace(global_scratch_size=1)
        made = SimpleNamespace(packed_metadata=(), function=0, name=kernel.__name__, run=wrapper)
        kernel.device_caches[device][0][key] = made
        return made

    def launch_compiled(compiled, kernel, grid, arguments, options, addressed):
        asked.add(kernel.__name__)
        sequences.launched.append((kernel.__name__, grid, *map(said, arguments), repr(options)))
        if kernel[grid](*arguments, **options) is not compiled.kernel:
            other.add(kernel.__name__)

    with (
        h200(),
        mock.patch.object(JITFunction, "run", choose),
        mock.patch.object(JITFunction, "_do_compile", choice),
        mock.patch.object(launching, "launch_compiled", launch_compiled),
        mock.patch.object(self_check, "tiles_agree", return_value=True),
        mock.patch.object(offline_h200._OnGPU, "data_ptr", lambda x: memory.data_ptr(x)),
        mock.patch.object(private_api, "current_device", return_value=0),
        mock.patch("torch.cuda.current_device", return_value=0),
        torch.no_grad(),
    ):
        for module in (attention_forward, logp_launch):
            mock.patch.object(module, "replay_or_run", sequences.replay_or_run).start()
        if fault:
            mock.patch.object(logp_launch, "shape_cache", return_value=ShapeCache()).start()
        for m, h, v in ((1, 256, 5000), (16, 1024, 16384), (33, 1024, 16384), (300, 1000, 1023)):
            for call in calls(m, h, v):
                for _ in range(3):
                    call()
        if not (fault or short_keys):
            moved(memory)
    print("relaunched:", *sorted(asked))
    print("other:", *sorted(other))
    print("sequences:", *sorted(sequences.relaunched))
    print("differ:", *sorted(sequences.differ))
    print(
        "unneeded:",
        *(f"{name}.{i}" for (name, i), needed in sequences.places.items() if not needed),
    )
    return int(bool(other or sequences.differ) or not asked)


if __name__ == "__main__":
    sys.exit(main("--fault" in sys.argv, "--short-keys" in sys.argv))
