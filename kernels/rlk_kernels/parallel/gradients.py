"""Sums gradients over data-parallel ranks in one order.

    sum = (g0 + g1) + (g2 + g3) ...     fp32, in pairs of neighbours, rounded once at the end

Ranks copy their gradients to each other, and each rank adds up its share in rank order, so the sum
repeats over any transport. If every sample (or group of samples) is a leaf of this tree, the sum is
also the same for any number of ranks: with R ranks, a power of two, each backward gives R
neighbouring leaves, one on each rank, and `MicroBatches` adds up a power of two of backwards.

R = ranks
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.parallel.collectives import wait
from rlk_kernels.parallel.gradient_rows import norm_of, row_squares

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def sum_in_pairs(parts: Sequence[Tensor]) -> Tensor:
    """The fp32 sum of tensors of one shape, in pairs of neighbours. The last of an odd number is
    added in a later round."""
    parts = [part.float() for part in parts]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


class Reduction:
    """A reduce-scatter in progress."""

    def __init__(
        self, received: Tensor, output: Tensor, average: bool, work: Any, group: Any
    ) -> None:
        self._received, self._output, self._average = received, output, average
        self._work, self._group = work, group

    def wait(self) -> None:
        if self._work is not None:
            wait(self._work, self._received, self._group, "reduce_scatter")
        total = sum_in_pairs(self._received.unbind())
        self._output.copy_(total / len(self._received) if self._average else total)


def reduce_scatter(
    output: Tensor, input: Tensor, op: Any = SUM, group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Reduction | None:  # fmt: skip
    """output[n] = this rank's share of the sum of all ranks' input[R n]; with `async_op`, after
    waiting for the returned work. The arguments are those of torch.distributed; the input may
    contain the output. Raises UnsupportedShape for an `op` other than SUM and AVG."""
    if op not in (SUM, AVG):
        raise UnsupportedShape(f"reduce_scatter: op={op}; only SUM and AVG have an order")
    ranks = dist.get_world_size(group)
    received = torch.empty_like(input)
    # On a CPU, `collectives.wait` waits with a time limit.
    waits = async_op or input.device.type == "cpu"
    work = dist.all_to_all_single(received, input.contiguous(), group=group, async_op=waits)
    reduction = Reduction(received.view(ranks, -1), output.view(-1), op == AVG, work, group)
    if async_op:
        return reduction
    reduction.wait()
    return None


class OrderedReduceScatter:
    """For FSDP2: call `module.set_custom_reduce_scatter(OrderedReduceScatter())` on each module
    that was passed to `fully_shard`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> Reduction | None:  # fmt: skip
        return reduce_scatter(output_tensor, input_tensor, op, group, async_op)


class MicroBatches:
    """Adds up the gradients of several backwards in pairs of neighbours. Each backward is a leaf,
    and at most log2 of their number are in memory at a time."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._waiting: list[tuple[int, list[Tensor | None]]] = []

    def add(self) -> None:
        """Takes each parameter's `grad` after a backward."""
        sums: list[Tensor | None] = []
        for parameter in self._parameters:
            sums.append(None if parameter.grad is None else parameter.grad.float())
            parameter.grad = None
        count = 1
        while self._waiting and self._waiting[-1][0] == count:
            _, before = self._waiting.pop()
            sums = [_plus(a, b) for a, b in zip(before, sums, strict=True)]
            count *= 2
        self._waiting.append((count, sums))

    def finish(self) -> None:
        """Sets each parameter's `grad` to the sum, rounded to the parameter's dtype.

        Raises UnsupportedShape if the number of backwards is not a power of two, because twice as
        many ranks with half as many backwards would give another sum.
        """
        counts = [count for count, _ in self._waiting]
        if len(counts) != 1:
            raise UnsupportedShape(
                f"{sum(counts)} micro-batches; a power of two is needed for a gradient that does "
                "not depend on the number of ranks"
            )
        ((_, sums),), self._waiting = self._waiting, []
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = None if total is None else total.to(parameter.dtype)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients, float64: the rank of a row adds up its squares, and the rows are
    added up in the order of the whole parameter. FSDP2 shards parameters by rows, so the norm is
    the same for any number of ranks. Call this on all of them.

    Raises UnsupportedShape for a DTensor with another placement.
    """
    return norm_of([_of_rows(p.grad) for p in parameters if p.grad is not None])


def _of_rows(grad: Tensor) -> Tensor:
    """float64 [rows]: the sum of squares of each row of the whole gradient."""
    if not isinstance(grad, DTensor):
        return row_squares(grad)
    if any(not p.is_replicate() and not p.is_shard(0) for p in grad.placements):
        raise UnsupportedShape(
            f"gradient_norm: a gradient has placements {grad.placements}; whole rows are needed"
        )
    rows = DTensor.from_local(
        row_squares(grad.to_local()), grad.device_mesh, grad.placements,
        shape=grad.shape[:1], stride=(1,),
    )  # fmt: skip
    return rows.full_tensor()
