"""Faults of sparse layers. Most of them change more than one tensor, so the engine's `SparseLayers`
plants them."""

from collections.abc import Callable

import torch

from rlk_align.selftest.planting.operands import Unit, formula
from rlk_align.selftest.planting.sparse_layers import Routing, SparseLayers

Plant = Callable[[SparseLayers, int], None]
"""(sparse layers of the model, number of a layer): plants a fault into that layer."""
LEFT_OUT = 2
"""The expert whose rows are missing."""


def least_liked(_: float) -> Plant:
    """The last expert of every fifth row is the one with the lowest score."""

    def choose(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        changed = chosen.clone()
        changed[::5, -1] = scores[::5].argmin(dim=1)
        return changed

    return lambda layers, layer: layers.change_choice(layer, choose)


def other_of_ties(_: float) -> Plant:
    """If the least of the chosen scores is also the score of an omitted expert, the omitted one is
    chosen instead."""

    def choose(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        least = scores.gather(1, chosen).min(dim=1, keepdim=True)
        left_out = scores.scatter(1, chosen, -torch.inf).max(dim=1, keepdim=True)
        other = chosen.scatter(1, least.indices, left_out.indices)
        return torch.where(left_out.values == least.values, other, chosen)

    return lambda layers, layer: layers.change_choice(layer, choose)


def over_all_experts(_: float) -> Plant:
    """Weights are the softmax over all experts, and do not add up to 1."""

    def change(routing: Routing) -> torch.Tensor:
        return routing.logits.float().softmax(dim=1).gather(1, routing.chosen)

    return lambda layers, layer: layers.change_weights(layer, change)


def one_left_out(_: float) -> Plant:
    """One expert's rows are missing."""
    return lambda layers, layer: layers.leave_out(layer, LEFT_OUT)


def shared_gate_left_out(_: float) -> Plant:
    """The shared expert's row is not multiplied by the sigmoid of its gate."""
    return lambda layers, layer: layers.leave_out_gate(layer)


def biases_dropped(_: float) -> Plant:
    """The products of the experts have no biases."""
    return lambda layers, layer: layers.drop_biases(layer)


def clamp_left_out(_: float) -> Plant:
    """The experts activate gate and up as they are."""
    return lambda layers, layer: layers.leave_out_clamp(layer)


def first_two_swapped(_: float) -> Plant:
    """Swaps the first weights of the first two experts."""
    return lambda layers, layer: layers.swap_experts(layer, 0, 1)


def weighed_before_activation(_: float) -> Plant:
    """An expert's weight multiplies its gate."""
    return lambda layers, layer: layers.weigh_before_activation(layer)


@formula
def every_seventh_dropped(unit: Unit, _: float) -> torch.Tensor:
    """Zeros for every seventh row."""
    result = unit.result.clone()
    result[::7] = 0
    return result
