"""The sparse layers of an SGLang decoder: the values that can be observed, and the experts'
weights."""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.experts import (
    Choose,
    Show,
    by_ascending_id,
    choice_replaced,
    choose_on_kernels,
    has_kernels,
    on_kernels,
)
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.engines.common.weights import shared_evenly
from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import EngineFailed

FUSED = "SGLang computes a layer's experts in one call, in which no module sees their rows"


def sparse_blocks(model: Any) -> dict[int, Any]:
    """Index of a sparse layer -> its block."""
    blocks = ((i, layer.mlp) for i, layer in enumerate(model.model.layers))
    return {i: block for i, block in blocks if hasattr(block, "experts")}


def on_choices(hooks: Hooks, model: Any, show: Show) -> None:
    """Calls `show(site, value)` with each token's experts and their weights, and with whatever else
    the kernels compute inside a layer."""
    for i, block in sparse_blocks(model).items():
        if has_kernels(block):
            on_kernels(hooks, block, i, show)
            _on_router(hooks, block, f"layers.{i}.router", show)
        else:
            _on_choice(hooks, block.topk, f"layers.{i}", show)


def _on_router(hooks: Hooks, block: Any, site: str, show: Show) -> None:
    """Shows the logits of a router that the kernels compute, which is no module then."""
    product = block.logits

    def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = product(x, weight)
        show(site, result)
        return result

    hooks.replace(block, "logits", logits)


def _on_choice(hooks: Hooks, topk: Any, name: str, show: Show) -> None:
    def see(output: Any) -> None:
        ids, weights = by_ascending_id(output.topk_ids, output.topk_weights)
        show(f"{name}.experts", ids)
        show(f"{name}.routing_weights", weights)

    hooks.on_output(topk, see)


def replay_choices(hooks: SiteHooks, model: Any) -> None:
    """Makes the routers whose choice is overwritten choose the recorded experts."""
    for i, block in sparse_blocks(model).items():
        choose = hooks.recorded_choice(f"layers.{i}.experts")
        if choose is not None:
            replace_choice(hooks, block, choose)


def replace_choice(hooks: Hooks, block: Any, choose: Choose) -> None:
    """Replaces the choice of a layer's router. Unless the kernels compute it, the router raises
    EngineFailed as it runs if it does not choose by `torch.topk`."""
    if has_kernels(block):
        choose_on_kernels(hooks, block, choose)
        return
    route, experts = block.topk.forward, block.experts.num_experts

    def forward(*args: Any, **kwargs: Any) -> Any:
        with choice_replaced(choose, experts) as calls:
            routed = route(*args, **kwargs)
        if len(calls) != 1:
            raise EngineFailed(
                "this SGLang chooses experts inside a kernel, which accepts no choice from outside",
                "leave the experts out of --sites",
            )
        return routed

    hooks.replace(block.topk, "forward", forward)


def expert_weights(model: Any, ranks: Ranks) -> Iterator[LiveParameter]:
    """The weights of all experts, which SGLang stacks with gate above up; called on all ranks."""
    for i, block in sparse_blocks(model).items():
        gate_up, down = block.experts.w13_weight.detach(), block.experts.w2_weight.detach()
        half = gate_up.shape[1] // 2
        # With the kernels, the ranks share the rows of down_proj.
        dim = 0 if ranks.world > 1 and has_kernels(block) else 1
        for e in range(len(gate_up)):
            of = f"layers.{i}.experts.{e}"
            yield shared_evenly(f"{of}.gate_proj", gate_up[e, :half], 0, ranks)
            yield shared_evenly(f"{of}.up_proj", gate_up[e, half:], 0, ranks)
            yield shared_evenly(f"{of}.down_proj", down[e], dim, ranks)
