"""The sparse layers of a live HF decoder, as planted faults change them.

N = rows, E = experts, K = experts of a row
"""

from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.faults.kernels import KernelLayers
from rlk_align.engines.faults.sparse import Routing, SparseLayers, swap
from rlk_align.engines.faults.unit import Formula, Unit, in_place_of
from rlk_align.engines.hf.experts import replace_choice, sparse_blocks


class HFSparseLayers(SparseLayers):
    """The sparse layers of a model of transformers."""

    def __init__(self, hooks: Hooks, model: Any) -> None:
        self._hooks = hooks
        self._blocks = dict(sparse_blocks(model))

    def change_logits(self, layer: int, formula: Formula) -> None:
        """A router's product is its only call of `torch.nn.functional.linear`."""
        gate, functional = self._blocks[layer].gate, torch.nn.functional
        route, product = gate.forward, functional.linear

        def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            result = product(x, weight)
            unit = Unit(result=result, inputs=(x,), weight=weight.detach(), head_dim=1)
            return in_place_of(formula, unit)

        def forward(*args: Any, **kwargs: Any) -> Any:
            functional.linear = linear
            try:
                return route(*args, **kwargs)
            finally:
                functional.linear = product

        self._hooks.replace(gate, "forward", forward)

    def change_choice(self, layer: int, choose: Choose) -> None:
        replace_choice(self._hooks, self._blocks[layer], choose)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        def see(_module: Any, _inputs: Any, output: Any) -> Any:
            logits, weights, chosen = output
            new = change(Routing(logits=logits, chosen=chosen, weights=weights))
            return logits, new.to(weights.dtype), chosen

        self._hooks.after(self._blocks[layer].gate, see)

    def leave_out(self, layer: int, expert: int) -> None:
        def see(_module: Any, inputs: Any) -> Any:
            hidden, chosen, weights = inputs
            return hidden, chosen, weights.masked_fill(chosen == expert, 0)

        self._hooks.before(self._blocks[layer].experts, see)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        weight = self._blocks[layer].experts.gate_up_proj.detach()
        swap(self._hooks, weight[one], weight[other])

    def weigh_before_activation(self, layer: int) -> None:
        """In transformers' `grouped_mm`, whose rows are sorted by their experts."""
        experts = self._blocks[layer].experts
        sorted_weights: list[torch.Tensor] = []

        def note(_module: Any, inputs: Any) -> Any:
            hidden, chosen, weights = inputs
            order = torch.sort(chosen.reshape(-1))[1]
            sorted_weights[:] = [weights.reshape(-1)[order, None]]
            return hidden, chosen, torch.ones_like(weights)

        def apply(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return experts.act_fn(gate * sorted_weights[0]) * up

        self._hooks.before(experts, note)
        self._hooks.replace(experts, "_apply_gate", apply)


class HFKernelLayers(KernelLayers, HFSparseLayers):
    """With the kernels in them."""

    def _chooser(self, layer: int) -> Any:
        return self._blocks[layer].gate

    def _computer(self, layer: int) -> Any:
        return self._blocks[layer].experts
