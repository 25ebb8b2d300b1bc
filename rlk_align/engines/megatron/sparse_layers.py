"""The sparse layers of a live GPTModel, as planted faults change them."""

from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose, choice_replaced
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.faults.kernels import KernelLayers
from rlk_align.engines.faults.sparse import Routing, SparseLayers, swap
from rlk_align.engines.faults.unit import Formula, Unit, in_place_of


class MegatronSparseLayers(SparseLayers):
    """The sparse layers of one rank, which has all experts or a share of them."""

    def __init__(self, hooks: Hooks, layer: Callable[[int], Any], experts: range) -> None:
        """`layer`: the model's layer of that number; `experts`: those that this rank has."""
        self._hooks, self._layer, self._experts = hooks, layer, experts

    def change_logits(self, layer: int, formula: Formula) -> None:
        router = self._layer(layer).mlp.router
        weight = router.weight.detach()

        def gating(hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
            flat = result.reshape(-1, result.shape[-1])
            x = hidden.reshape(len(flat), -1)
            unit = Unit(result=flat, inputs=(x,), weight=weight, head_dim=1)
            return in_place_of(formula, unit).reshape(result.shape)

        self._after_gating(router, gating)

    def change_choice(self, layer: int, choose: Choose) -> None:
        router = self._layer(layer).mlp.router
        route = router.routing

        def routing(*args: Any, **kwargs: Any) -> Any:
            with choice_replaced(choose, len(router.weight)):
                return route(*args, **kwargs)

        self._hooks.replace(router, "routing", routing)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        router = self._layer(layer).mlp.router
        latest: list[torch.Tensor] = []

        def note(_hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            latest[:] = [logits.reshape(-1, logits.shape[-1])]
            return logits

        def see(_module: Any, _inputs: Any, output: Any) -> Any:
            weights, sent = output
            chosen = sent.nonzero(as_tuple=True)[1].reshape(len(sent), -1)
            own = weights.gather(1, chosen)
            new = change(Routing(logits=latest[0], chosen=chosen, weights=own))
            return weights.scatter(1, chosen, new.to(weights.dtype)), sent

        self._after_gating(router, note)
        self._hooks.after(router, see)

    def leave_out(self, layer: int, expert: int) -> None:
        def see(_module: Any, _inputs: Any, output: Any) -> Any:
            rows, *rest = output
            return (torch.zeros_like(rows), *rest)

        if expert in self._experts:
            self._hooks.after(self._expert(layer, expert).linear_fc2, see)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        if one not in self._experts or other not in self._experts:
            return
        weights = (self._expert(layer, e).linear_fc1.weight.detach() for e in (one, other))
        swap(self._hooks, *weights)

    def _expert(self, layer: int, number: int) -> Any:
        return self._layer(layer).mlp.experts.local_experts[number - self._experts.start]

    def _after_gating(
        self, router: Any, see: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        """`see(hidden, logits)` is what the router's product gives."""
        gating = router.gating

        def changed(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return see(hidden, gating(hidden, *args, **kwargs))

        self._hooks.replace(router, "gating", changed)


class MegatronKernelLayers(KernelLayers, MegatronSparseLayers):
    """With the kernels in them: a token's own rank adds up the rows of its experts."""

    def _chooser(self, layer: int) -> Any:
        return self._layer(layer).mlp

    _computer = _chooser
