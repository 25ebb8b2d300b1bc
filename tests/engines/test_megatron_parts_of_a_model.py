"""The part of a model and of its sequences that a rank of Megatron has."""

import numpy as np
import pytest
import torch
from rlk_kernels.parallel.context import owners

from rlk_align.engines.common.places import Place
from rlk_align.engines.megatron.slices import Slices
from rlk_align.engines.megatron.stages import Stage
from rlk_align.engines.process.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("parts", [(1,), (2, 1, 3)])
def test_slices_are_those_of_the_kernels(world: int, parts: tuple[int, ...]) -> None:
    """And every row belongs to one rank."""
    begins = np.cumsum([0, *(2 * world * p for p in parts)]).tolist()
    held = [Slices(tuple(begins), Ranks(r, world, CPU)).columns() for r in range(world)]
    assert sorted(np.concatenate(held).tolist()) == list(range(begins[-1]))
    if world > 1:
        rank, index = owners(torch.tensor(begins), begins[-1], world)
        for r, i, row in zip(rank.tolist(), index.tolist(), range(begins[-1]), strict=True):
            assert held[r][i] == row


def test_a_slice_is_taken_out_of_the_whole() -> None:
    slices = Slices((0, 4, 12), Ranks(1, 2, CPU))
    assert slices.own(torch.arange(12)).tolist() == [1, 2, 6, 7, 8, 9]
    assert slices.columns(0).tolist() == [0, 3, 4, 5, 10, 11]


def test_names_of_a_stage_are_those_of_the_model() -> None:
    stage = Stage(1, 2, 6, experts=range(4, 8))
    name = "decoder.layers.4.mlp.experts.local_experts.5.linear_fc1.weight"
    local = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    assert stage.local(name) == local
    assert stage.whole(local) == name
    assert stage.local("output_layer") == stage.whole("output_layer") == "output_layer"
    held = ["layers.3.attn", "layers.5.mlp_residual", "final_norm", "logits", "logprob"]
    assert all(stage.computes(site) for site in held)
    assert not any(stage.computes(site) for site in ("embed", "layers.2.attn"))
    assert stage.holds("layers.3.experts.4.gate_proj")
    assert not stage.holds("layers.3.experts.3.gate_proj")
    assert not stage.holds("layers.1.experts.4.gate_proj")
    places = [Place(sites=(f"layers.{i}.attn",), module=f"decoder.layers.{i}.x") for i in range(6)]
    assert [p.module for p in stage.places(places)] == [f"decoder.layers.{i}.x" for i in range(3)]
    assert [p.sites[0] for p in stage.places(places)] == [f"layers.{i}.attn" for i in (3, 4, 5)]
