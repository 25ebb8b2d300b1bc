"""The sparse layer of Megatron-core with the kernels, its experts shared by ranks: the bits of one
rank, of the tokens of all ranks together."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from gloo_ranks import on_ranks

EXPERTS, HIDDEN, INNER, TOKENS = 4, 32, 24, 18


def _layer(group: Any) -> dict[str, Tensor]:
    """What a rank's tokens become, and gradients: of them, its first expert, and the router."""
    from megatron.core import parallel_state
    from test_megatron_parts import made
    from test_sparse_parts import sparse_config

    from rlk_align.engines.megatron.cpu import cpu_stand_ins

    world, rank = group.size(), group.rank()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    with cpu_stand_ins():
        model = made(sparse_config(expert_model_parallel_size=world)).bfloat16()
        layer = model.decoder.layers[1].mlp
        experts = layer.experts.local_experts
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        with torch.no_grad():
            layer.router.weight.copy_(normal(EXPERTS, HIDDEN))
            for e in range(EXPERTS):
                first, second = normal(2 * INNER, HIDDEN), normal(HIDDEN, INNER)
                if e // len(experts) == rank:
                    experts[e % len(experts)].linear_fc1.weight.copy_(first)
                    experts[e % len(experts)].linear_fc2.weight.copy_(second)
        x, grad = (normal(TOKENS, 1, HIDDEN).chunk(world)[rank].clone() for _ in range(2))
        y, _ = layer(x.requires_grad_())
        y.backward(grad)
    first = experts[0]
    return {
        "y": y.detach(),
        "x": x.grad,
        "up": first.linear_fc1.weight.grad[None],
        "down": first.linear_fc2.weight.grad[None],
    }


@pytest.mark.parametrize("world", [2, 4])
def test_megatrons_layer_has_the_bits_of_one_rank(world: int) -> None:
    pytest.importorskip("megatron.core")
    (one,), ranks = on_ranks(1, _layer), on_ranks(world, _layer)
    for name in ("y", "x"):
        assert torch.equal(torch.cat([rank[name] for rank in ranks]), one[name]), name
        assert bool(one[name].any())
    for name in ("up", "down"):
        assert torch.equal(ranks[0][name], one[name]), name
