"""Times the adapters of a layer of Qwen3-8B beside vLLM's own: rank 16, all seven projections.

A layer is four calls, as vLLM has four linears: q, k and v; o; gate and up; down. vLLM's own call
is its `lora_shrink` into a buffer and its `lora_expand`, which adds to the rows in place; without
vLLM its column is missing. Before a time is taken, the rows are held to those of single rows and to
those of the halves of `add_lora`, bit for bit.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import rlk_kernels as rk
import torch
from timing import copies, graphs_ms, rand
from torch import Tensor

RANK, SCALE = 16, 2.0
ROWS = (1, 16, 64, 256)
LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
"""Linear -> (K, the columns of its projections)."""
ADAPTERS = ((1, 1), (8, 8), (8, 1))
"""(slots, adapters that the rows have in turn)."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rows and the adapters of one linear."""

    x: Tensor
    base: Tensor
    a: Tensor
    """[P, S, R, K]."""
    b: Tensor
    """[S, N, R]."""
    scales: Tensor
    """[P, S]."""
    slots: Tensor
    widths: tuple[int, ...]

    def ours(self, rows: slice = slice(None)) -> Tensor:
        how = self.a, self.b, self.scales, self.slots[rows]
        return rk.add_lora(self.x[rows], self.base[rows], *how, widths=self.widths)

    def halves(self) -> Tensor:
        """The same, by the halves of `add_lora` for each projection."""
        parts = zip(
            self.a, self.b.split(self.widths, 1), self.scales, self.base.split(self.widths, 1),
            strict=True,
        )  # fmt: skip
        return torch.cat([
            rk.lora_expand(rk.lora_shrink(self.x, a, s, self.slots), base, b, s, self.slots)
            for a, b, s, base in parts
        ], 1)  # fmt: skip


def adapted(linear: str, rows: int, slots: int, present: int) -> Adapted:
    k, widths = LINEARS[linear]
    n, projections = sum(widths), len(widths)
    return Adapted(
        rand(rows, k), rand(rows, n), rand(projections, slots, RANK, k, scale=k**-0.5),
        rand(slots, n, RANK, scale=0.1), torch.full((projections, slots), SCALE, device="cuda"),
        torch.arange(rows, device="cuda") % present, widths,
    )  # fmt: skip


def hold_to_single_rows(of: Adapted) -> None:
    """Raises AssertionError if a row of a batch differs from that row alone, or from that of the
    halves."""
    y = of.ours()
    assert torch.equal(y, of.halves()), "add_lora differs from its halves"
    for t in range(0, len(y), max(1, len(y) // 16)):
        assert torch.equal(of.ours(slice(t, t + 1)), y[t : t + 1]), f"row {t} differs alone"
    assert not torch.equal(y, of.base), "the adapters change nothing"


def of_vllm(slots: int, mapping: Tensor) -> Callable[[Adapted], Call] | None:
    """What makes vLLM's call for a linear; None without vLLM."""
    try:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink
    except ImportError:
        return None
    rows = len(mapping)
    meta = LoRAKernelMeta.make(slots, rows, device="cuda")
    meta.prepare_tensors(mapping.int())
    specialized = "specialize_active_lora" in inspect.signature(meta.meta_args).parameters
    arguments = meta.meta_args(rows, *([False] if specialized else []))

    def make(of: Adapted) -> Call:
        a = tuple(x[:, None].contiguous() for x in of.a)
        b = tuple(x[:, None].contiguous() for x in of.b.split(of.widths, 1))
        y = of.base.clone()

        def call() -> None:
            shape = len(of.widths), rows, RANK
            h = torch.empty(shape, dtype=torch.float32, device="cuda")
            lora_shrink(of.x, a, h, *arguments, 1.0)
            lora_expand(h, b, y, *arguments, offset_start=0, add_inputs=True)

        return call

    return make


def measure(ceilings: dict) -> list[dict]:
    """Microseconds of each linear and of a layer, by rows and adapters."""
    records = []
    for rows in ROWS:
        for slots, present in ADAPTERS:
            layers = []
            weights = slots * RANK * 2 * sum(len(w) * k + sum(w) for k, w in LINEARS.values())
            for _ in range(copies(weights, over=150 << 20)):
                layers.append({name: adapted(name, rows, slots, present) for name in LINEARS})
            for of in layers[0].values():
                hold_to_single_rows(of)
            theirs = of_vllm(slots, layers[0]["o"].slots)
            of_layers = {"rlk": [[of.ours for of in layer.values()] for layer in layers]}
            if theirs is not None:
                of_layers["vllm"] = [[theirs(of) for of in layer.values()] for layer in layers]
            for i, name in enumerate((*LINEARS, "layer")):
                part = slice(None) if name == "layer" else slice(i, i + 1)
                calls = {n: [_together(each[part]) for each in of] for n, of in of_layers.items()}
                us = {n: ms * 1e3 for n, ms in graphs_ms(calls).items()}
                record = {"linear": name, "rows": rows, "slots": slots, "adapters": present}
                records.append(record | {"us": us})
    return records


def _together(calls: list[Call]) -> Call:
    def call() -> None:
        for each in calls:
            each()

    return call
