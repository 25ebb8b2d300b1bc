"""A norm whose rows are divided among ranks, by sequence or by heads: outputs and gradients have
the bits of one rank."""

from typing import Any

import pytest
import rlk_kernels
import torch
from gloo_ranks import on_ranks
from rlk_kernels.parallel.rms_norm import Shared, rms_norm_parallel
from torch import Tensor

S, B, HEADS, D = 8, 3, 4, 32
DIM = {"sequence": 0, "heads": 2}
CALL = {"cast": "vllm", "backend": "torch"}


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """x[S, B, HEADS, D], weight[D] and dy, of many magnitudes."""
    generator = torch.Generator().manual_seed(0)

    def wide(*shape: int) -> Tensor:
        scale = 2.0 ** torch.randint(-9, 3, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    return wide(S, B, HEADS, D), wide(D), wide(S, B, HEADS, D)


def _shared(group: Any, shared: Shared) -> tuple[Tensor, ...]:
    """(y, dx, dweight) of a rank."""
    x, weight, dy = problem()
    x, dy = (t.chunk(group.size(), DIM[shared])[group.rank()].clone() for t in (x, dy))
    x.requires_grad_(), weight.requires_grad_()
    y = rms_norm_parallel(x, weight, 1e-6, shared, group, **CALL)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def alone() -> tuple[Tensor, ...]:
    x, weight, dy = problem()
    x.requires_grad_(), weight.requires_grad_()
    y = rlk_kernels.rms_norm(x, weight, 1e-6, **CALL)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize(("world", "shared"), [(2, "sequence"), (4, "heads")])
def test_a_norm_has_the_gradient_of_one_rank(world: int, shared: Shared) -> None:
    y, dx, dweight = alone()
    ranks = on_ranks(world, _shared, shared)
    for whole, parts in ((y, [r[0] for r in ranks]), (dx, [r[1] for r in ranks])):
        assert torch.cat(parts, DIM[shared]).equal(whole)
    first, *others = (r[2] for r in ranks)
    assert first.equal(dweight)
    assert not any(bool(other.any()) for other in others)


def test_partial_gradients_have_another_sum() -> None:
    """A planted fault: ranks sum their own rows and add up the sums."""
    x, weight, dy = problem()
    parts = []
    for rows, drows in zip(x.chunk(2), dy.chunk(2), strict=True):
        own = weight.clone().requires_grad_()
        rlk_kernels.rms_norm(rows, own, 1e-6, **CALL).backward(drows)
        parts.append(own.grad)
    assert not (parts[0] + parts[1]).equal(alone()[2])
