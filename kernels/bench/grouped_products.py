"""Computes a sparse layer's two products by expert with other libraries, and checks the results.

Every library gets rows that are sorted by expert, on the device. DeepGEMM's groups begin at
multiples of a tile's rows, or have a buffer each. Neither sorting nor padding is timed.

S = rows of all experts   E = experts   H, I = hidden, inner features
"""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 2**-8
"""The largest difference from the exact row, as a share of its norm: twice bf16's rounding."""


class Task(NamedTuple):
    """The operands, bf16."""

    x: Tensor
    """[S, H]: the rows of the first product."""
    up: Tensor
    """[E, 2 I, H]"""
    inner: Tensor
    """[S, I]: the rows of the second product."""
    down: Tensor
    """[E, H, I]"""
    counts: list[int]
    """The number of rows of each expert."""


class Products(NamedTuple):
    """Both products, as one library computes them."""

    run: Callable[[], tuple[Tensor, Tensor]]
    """Returns the rows of the first product [..., 2 I] and of the second [..., H], in the library's
    order."""
    position: Tensor
    """int64 [S]: for each row of the task, its index among the rows of a result."""


def exact(task: Task) -> tuple[Tensor, Tensor]:
    """fp32 [S, 2 I] and [S, H]: both products with fp32 values, an expert at a time."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        parts = zip(x.split(task.counts), weight, strict=True)
        return torch.cat([rows.float() @ w.float().T for rows, w in parts])

    return product(task.x, task.up), product(task.inner, task.down)


def check(products: Products, right: tuple[Tensor, Tensor]) -> None:
    """Raises ArithmeticError where a row of either product is not the row of `right`."""
    for which, got, want in zip(("first", "second"), products.run(), right, strict=True):
        off = (got.flatten(0, -2)[products.position].float() - want).norm(dim=1) / want.norm(dim=1)
        close = (off <= LIMIT).sum().item()
        if not close == len(off) > 0:
            raise ArithmeticError(
                f"{close} of {len(off)} rows of the {which} product are those of the exact one: "
                f"the others differ by over {LIMIT:.1e} of a row's norm"
            )


def by_cublas(task: Task) -> Products:
    """One product for each expert that has rows; the host knows their numbers."""
    first = task.x.new_empty(len(task.x), task.up.shape[1])
    second = task.x.new_empty(len(task.x), task.down.shape[1])

    def calls(x: Tensor, weight: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = zip(x.split(task.counts), weight, out.split(task.counts), strict=True)
        return [(rows, w.T, to) for rows, w, to in parts if len(rows)]

    every = calls(task.x, task.up, first) + calls(task.inner, task.down, second)

    def run() -> tuple[Tensor, Tensor]:
        for rows, weight, out in every:
            torch.mm(rows, weight, out=out)
        return first, second

    return Products(run, _in_order(task))


def by_grouped_mm(task: Task) -> Products:
    """torch's own grouped product."""
    ends = torch.tensor(task.counts, device=task.x.device).cumsum(0).int()

    def run() -> tuple[Tensor, Tensor]:
        first = torch._grouped_mm(task.x, task.up.mT, offs=ends)
        return first, torch._grouped_mm(task.inner, task.down.mT, offs=ends)

    return Products(run, _in_order(task))


def by_deep_gemm(task: Task) -> Products:
    """DeepGEMM on groups in one buffer; each group is padded with zeros to whole tiles of rows."""
    deep = _deep_gemm()
    unit = deep.get_mk_alignment_for_contiguous_layout()
    padded = [-(-n // unit) * unit for n in task.counts]
    owner = _experts(task, padded).int()
    position = _begins(task, padded) + _rank(task)
    x, inner = (_laid_out(rows, position, len(owner)) for rows in (task.x, task.inner))
    first = x.new_empty(len(x), task.up.shape[1])
    second = x.new_empty(len(x), task.down.shape[1])

    def run() -> tuple[Tensor, Tensor]:
        deep.m_grouped_bf16_gemm_nt_contiguous(x, task.up, first, owner)
        deep.m_grouped_bf16_gemm_nt_contiguous(inner, task.down, second, owner)
        return first, second

    return Products(run, position)


def by_deep_gemm_masked(task: Task, most: int) -> Products:
    """DeepGEMM on groups in buffers of equal size, with a number of valid rows for each.

    most: the largest number of rows that an expert may have, which decides the size of the buffers,
    as if the host did not know the counts.
    """
    deep = _deep_gemm()
    experts = len(task.counts)
    size = -(-most // 128) * 128  # whole tiles, because a tile is stored whole
    valid = torch.tensor(task.counts, device=task.x.device, dtype=torch.int32)
    usual = -(-len(task.x) // experts)
    position = _begins(task, [size] * experts) + _rank(task)
    x, inner = (
        _laid_out(rows, position, experts * size).unflatten(0, (experts, size))
        for rows in (task.x, task.inner)
    )
    first = x.new_empty(experts, size, task.up.shape[1])
    second = x.new_empty(experts, size, task.down.shape[1])

    def run() -> tuple[Tensor, Tensor]:
        deep.m_grouped_bf16_gemm_nt_masked(x, task.up, first, valid, usual)
        deep.m_grouped_bf16_gemm_nt_masked(inner, task.down, second, valid, usual)
        return first, second

    return Products(run, position)


def _deep_gemm() -> ModuleType:
    """DeepGEMM as installed, or as vLLM bundles it; its launches overlap, as in vLLM."""
    installed = importlib.util.find_spec("deep_gemm")
    deep = importlib.import_module("deep_gemm" if installed else "vllm.third_party.deep_gemm")
    deep.set_pdl(True)
    return deep


def _in_order(task: Task) -> Tensor:
    return torch.arange(len(task.x), device=task.x.device)


def _experts(task: Task, counts: list[int]) -> Tensor:
    """int64 [sum of counts]: the expert of each row."""
    each = torch.tensor(counts, device=task.x.device)
    return torch.arange(len(counts), device=task.x.device).repeat_interleave(each)


def _begins(task: Task, sizes: list[int]) -> Tensor:
    """int64 [S]: for each row, where its expert's rows begin, if the experts have these sizes."""
    ends = torch.tensor(sizes, device=task.x.device).cumsum(0)
    return torch.cat((ends.new_zeros(1), ends[:-1]))[_experts(task, task.counts)]


def _rank(task: Task) -> Tensor:
    """int64 [S]: the index of each row among its expert's rows."""
    return _in_order(task) - _begins(task, task.counts)


def _laid_out(rows: Tensor, position: Tensor, size: int) -> Tensor:
    """[size, features]: the rows at their positions, and zeros elsewhere."""
    out = rows.new_zeros(size, rows.shape[1])
    out[position] = rows
    return out
