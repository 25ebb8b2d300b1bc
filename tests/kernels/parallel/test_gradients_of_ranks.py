"""Gradients of data-parallel ranks have one order of sums, so that they repeat. If samples are
leaves of its tree, gradients are the same for every number of ranks."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.parallel.gradients import (
    MicroBatches,
    OrderedReduceScatter,
    gradient_norm,
    reduce_scatter,
    sum_in_pairs,
)
from torch import Tensor

SAMPLES = 4


def leaf(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    scale = 2.0 ** torch.randint(-12, 3, (64,), generator=generator)
    return torch.randn(64, generator=generator) * scale


def test_the_order_is_that_of_pairs() -> None:
    a, b, c, d = (leaf(i) for i in range(4))
    assert sum_in_pairs([a, b, c, d]).equal((a + b) + (c + d))
    assert sum_in_pairs([a, b, c]).equal((a + b) + c)
    assert not sum_in_pairs([a, b, c, d]).equal(((a + b) + c) + d)
    small = sum_in_pairs([x.bfloat16() for x in (a, b)])
    assert small.dtype == torch.float32


def _scattered(group: Any) -> list[Tensor]:
    """Summed, averaged, and in place during other work."""
    own = leaf(group.rank())
    share = own.chunk(group.size())[group.rank()]
    summed, averaged = torch.empty_like(share), torch.empty_like(share)
    reduce_scatter(summed, own, group=group)
    reduce_scatter(averaged, own, torch.distributed.ReduceOp.AVG, group)
    work = reduce_scatter(share, own, group=group, async_op=True)
    assert work is not None
    work.wait()
    return [summed, averaged, share.clone()]


@pytest.mark.parametrize("world", [2, 4])
def test_a_reduce_scatter_adds_in_that_order(world: int) -> None:
    total = sum_in_pairs([leaf(i) for i in range(world)])
    found = [torch.cat(parts) for parts in zip(*on_ranks(world, _scattered), strict=True)]
    assert found[0].equal(total)
    assert found[1].equal(total / world)
    assert found[2].equal(total)


def test_another_operation_is_refused() -> None:
    with pytest.raises(UnsupportedShape, match="SUM and AVG have an order"):
        reduce_scatter(torch.empty(1), torch.empty(1), torch.distributed.ReduceOp.MAX)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    parts = (torch.nn.Linear(16, 24), torch.nn.SiLU(), torch.nn.Linear(24, 7))
    return torch.nn.Sequential(*parts)


def _trained(group: Any, ordered: bool) -> tuple[list[Tensor], Tensor]:
    """(whole gradients, their norm) of FSDP2 over four samples, dealt to ranks in order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (group.size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if ordered:
            module.set_custom_reduce_scatter(OrderedReduceScatter())
    batches = MicroBatches(model.parameters())
    for first in range(0, SAMPLES, group.size()):
        x = leaf(10 + first + group.rank()).view(4, 16)
        model(x).square().sum().backward()
        batches.add()
    batches.finish()
    # FSDP2 has divided by the number of ranks, a power of two.
    scale = group.size()
    norm = gradient_norm(model.parameters()) * scale
    return [p.grad.full_tensor() * scale for p in model.parameters()], norm


@functools.cache
def _of_leaves() -> tuple[list[Tensor], Tensor]:
    """Without ranks: the gradient of each sample, and their sum."""
    leaves = []
    for i in range(SAMPLES):
        model = _model()
        model(leaf(10 + i).view(4, 16)).square().sum().backward()
        leaves.append([p.grad for p in model.parameters()])
    model = _model()
    for p, parts in zip(model.parameters(), zip(*leaves, strict=True), strict=True):
        p.grad = sum_in_pairs(parts)
    return [p.grad for p in model.parameters()], gradient_norm(model.parameters())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fsdp_has_the_same_gradients_on_any_number_of_ranks(world: int) -> None:
    gradients, norm = _of_leaves()
    for own, own_norm in on_ranks(world, _trained, True):
        assert all(a.equal(b) for a, b in zip(own, gradients, strict=True))
        assert own_norm.equal(norm)
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    assert torch.allclose(norm, exact, rtol=1e-12)


def test_the_order_of_the_transport_is_noticed() -> None:
    """A planted fault: FSDP2's own reduce-scatter."""
    gradients, _ = _of_leaves()
    own, _ = on_ranks(4, _trained, False)[0]
    assert not all(a.equal(b) for a, b in zip(own, gradients, strict=True))


def test_fewer_micro_batches_than_a_power_of_two_are_refused() -> None:
    model = _model()
    batches = MicroBatches(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 16)).sum().backward()
        batches.add()
    with pytest.raises(UnsupportedShape, match="3 micro-batches; a power of two"):
        batches.finish()
    with pytest.raises(UnsupportedShape, match="0 micro-batches"):
        MicroBatches(model.parameters()).finish()


def test_gradients_that_are_added_one_after_another_are_noticed() -> None:
    """A planted fault: micro-batches are added up as in trainers."""
    gradients, _ = _of_leaves()
    model = _model()
    for i in range(SAMPLES):
        model(leaf(10 + i).view(4, 16)).square().sum().backward()
    assert not all(p.grad.equal(g) for p, g in zip(model.parameters(), gradients, strict=True))


def _megatron(group: Any, ordered: bool) -> Tensor:
    """The gradients that DistributedDataParallel has reduced on a rank, for one sample on each
    rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from rlk_kernels.integrations import megatron

    from rlk_align.engines.megatron.cpu import cpu_stand_ins

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, use_cpu_initialization=True
    )
    asked = DistributedDataParallelConfig(
        use_distributed_optimizer=True, reduce_scatter_with_fp32_accumulation=True
    )
    undo = megatron.ordered_reduce_scatter() if ordered else contextlib.nullcontext()
    with cpu_stand_ins(), undo:
        model = DistributedDataParallel(config, asked, _model())
        model(leaf(10 + group.rank()).view(4, 16)).square().sum().backward()
        model.finish_grad_sync()
        (buffer,) = model.buffers
        return buffer.grad_data.chunk(group.size())[group.rank()].clone()


def test_megatron_adds_in_that_order() -> None:
    pytest.importorskip("megatron.core")
    found = torch.cat(on_ranks(4, _megatron, True))
    gradients, _ = _of_leaves()
    # megatron-core averages. Its buffer has parameters from the last to the first, and padding.
    reduced = {x.item() for x in found}
    assert {x.item() for g in gradients for x in g.flatten() / 4} <= reduced
    assert not torch.cat(on_ranks(4, _megatron, False)).equal(found)
