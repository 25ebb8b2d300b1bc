"""The sparse layers of vLLM's live decoder, as planted faults change them."""

from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import first
from rlk_align.engines.faults.kernels import KernelLayers
from rlk_align.engines.faults.sparse import Routing, SparseLayers, swap
from rlk_align.engines.faults.unit import Formula, Unit, in_place_of
from rlk_align.engines.vllm.experts import replace_choice, sparse_blocks
from rlk_align.engines.vllm.weights import live_weight


class VLLMSparseLayers(SparseLayers):
    """The sparse layers of a model that one worker holds alone."""

    def __init__(self, hooks: Hooks, model: Any) -> None:
        self._hooks = hooks
        self._blocks = {i: block for i, _, block in sparse_blocks(model)}

    def change_logits(self, layer: int, formula: Formula) -> None:
        gate = self._blocks[layer].gate
        weight = live_weight(gate).detach()

        def see(_module: Any, inputs: Any, output: Any) -> Any:
            unit = Unit(result=first(output), inputs=(inputs[0],), weight=weight, head_dim=1)
            new = in_place_of(formula, unit)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        self._hooks.after(gate, see)

    def change_choice(self, layer: int, choose: Choose) -> None:
        replace_choice(self._hooks, self._blocks[layer].experts, choose)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        router = self._router(layer)
        route = router._compute_routing

        def compute(hidden: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            weights, chosen = route(hidden, logits, *args, **kwargs)
            new = change(Routing(logits=logits, chosen=chosen.long(), weights=weights))
            return new.to(weights.dtype), chosen

        self._hooks.replace(router, "_compute_routing", compute)

    def leave_out(self, layer: int, expert: int) -> None:
        routed = self._blocks[layer].experts.routed_experts
        compute = routed.forward_modular

        def forward(*, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **kwargs: Any) -> Any:
            weights = topk_weights.masked_fill(topk_ids == expert, 0)
            return compute(topk_weights=weights, topk_ids=topk_ids, **kwargs)

        self._hooks.replace(routed, "forward_modular", forward)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        # Packed or not, each expert's weight is a block of its own.
        weight = self._blocks[layer].experts.routed_experts.w13_weight.detach()
        swap(self._hooks, weight[one], weight[other])

    def _router(self, layer: int) -> Any:
        return self._blocks[layer].experts.router


class VLLMKernelLayers(KernelLayers, VLLMSparseLayers):
    """With the kernels in them. The router's product is a module here too."""

    change_logits = VLLMSparseLayers.change_logits

    def _chooser(self, layer: int) -> Any:
        return self._blocks[layer].experts

    _computer = _chooser
