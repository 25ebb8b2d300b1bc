"""Experts that are divided among ranks have the bits of one rank, forward and backward, over real
gloo. The one rank has the tokens of all ranks."""

import functools
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.parallel import experts as shared
from rlk_kernels.parallel.copies import gather_columns
from torch import Tensor

EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 48, 24
TOKENS = (5, 0, 9, 4)
"""Tokens of each of four ranks; each of two ranks has the tokens of two of them."""
BF16 = torch.bfloat16


def problem(skewed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(BF16)

    logits = torch.randn(sum(TOKENS), EXPERTS, generator=generator)
    if skewed:
        logits[:, :3] += 9.0  # nearly all rows go to one rank, and some ranks have none
    return {
        "x": normal(sum(TOKENS), HIDDEN),
        "logits": logits,
        "gate_up": normal(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
        "down": normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5),
        "grad": normal(sum(TOKENS), HIDDEN),
    }


def step(parts: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """y and the gradient of each leaf on one rank."""
    leaves = {n: parts[n].clone().requires_grad_() for n in ("x", "logits", "gate_up", "down")}
    layer = Sparse()
    weights, ids = layer.choose(leaves["logits"], TOP_K, True)
    y = layer.compute(leaves["x"], weights, ids, leaves["gate_up"], leaves["down"], group)
    y.backward(parts["grad"])
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@functools.cache
def alone(skewed: bool) -> dict[str, Tensor]:
    return step(problem(skewed), None)


def _rank(group: Any, skewed: bool, wrong: bool = False) -> dict[str, Tensor]:
    parts, world, rank = problem(skewed), group.size(), group.rank()
    each = len(TOKENS) // world
    lengths = [sum(TOKENS[r * each : (r + 1) * each]) for r in range(world)]
    for name in ("x", "logits", "grad"):
        parts[name] = parts[name].split(lengths)[rank]
    for name in ("gate_up", "down"):
        parts[name] = parts[name].chunk(world)[rank]
    if wrong:
        honest = shared._sent

        def reversed_rows(x: Tensor, *where: Any) -> Tensor:
            return honest(x, *where).flip(0)

        shared._sent = reversed_rows
    return step(parts, group)


def together(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_shared_experts_have_the_bits_of_one_rank(world: int, skewed: bool) -> None:
    found, expected = together(on_ranks(world, _rank, skewed)), alone(skewed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert bool(value.any()), name


class OfOutputs(Sparse):
    """A rank that has some outputs of each product by expert."""

    def __init__(self, group: Any, wrong: bool) -> None:
        self.group, self.wrong = group, wrong

    def columns(self, x: Tensor) -> Tensor:
        every = gather_columns(x, self.group)
        return every.roll(x.shape[-1], -1) if self.wrong else every


def _share_of_outputs(group: Any, skewed: bool, wrong: bool = False) -> dict[str, Tensor]:
    parts, world, rank = problem(skewed), group.size(), group.rank()
    halves = [half.chunk(world, 1)[rank] for half in parts["gate_up"].chunk(2, 1)]
    down = parts["down"].chunk(world, 1)[rank].contiguous()
    layer, shown = OfOutputs(group, wrong), {}
    with torch.no_grad():
        weights, ids = layer.choose(parts["logits"], TOP_K, True)
        y = layer.compute(parts["x"], weights, ids, torch.cat(halves, 1), down)
        layer.rlk_show = shown.__setitem__
        again = layer.compute(parts["x"], weights, ids, torch.cat(halves, 1), down)
    assert torch.equal(y, again)
    return {"y": y} | shown


def test_shared_outputs_have_the_bits_of_one_rank() -> None:
    """Each rank also shows its columns of an expert's rows."""
    layer, whole, parts = Sparse(), {}, problem(True)
    layer.rlk_show = whole.__setitem__
    weights, ids = layer.choose(parts["logits"], TOP_K, True)
    layer.compute(parts["x"], weights, ids, parts["gate_up"], parts["down"])
    for world in (2, 4):
        found = on_ranks(world, _share_of_outputs, True)
        for rank in found:
            assert torch.equal(rank.pop("y"), alone(True)["y"])
        for name in found[0]:
            slots = [rank[name].unflatten(1, (TOP_K, -1)) for rank in found]
            assert torch.equal(torch.cat(slots, -1).flatten(1), whole[name]), name
            assert bool(whole[name].any()), name


def test_columns_of_another_rank_are_noticed() -> None:
    (found, _) = on_ranks(2, functools.partial(_share_of_outputs, wrong=True), True)
    assert not torch.equal(found["y"], alone(True)["y"])


def test_rows_that_come_back_in_another_order_are_noticed() -> None:
    found = together(on_ranks(2, functools.partial(_rank, wrong=True), False))
    assert not torch.equal(found["y"], alone(False)["y"])


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    class Three:
        def size(self) -> int:
            return 3

    with pytest.raises(UnsupportedShape, match="3 ranks do not divide 8 experts"):
        shared.experts_parallel(
            torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int32), 8, Three(), lambda x, _: x
        )
