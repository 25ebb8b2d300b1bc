"""Sparse layers that the kernels compute, as planted faults change them: the same in every engine.

E = experts
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose, choose_on_kernels
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.faults.sparse import Routing, SparseLayers
from rlk_align.engines.faults.unit import Formula, Unit, in_place_of


class KernelLayers(SparseLayers):
    """Stands before an engine's own, which knows where the experts' weights are."""

    _hooks: Hooks

    @abstractmethod
    def _chooser(self, layer: int) -> Any:
        """What chooses experts by the kernels."""

    @abstractmethod
    def _computer(self, layer: int) -> Any:
        """What computes experts by the kernels and adds up their rows."""

    def change_logits(self, layer: int, formula: Formula) -> None:
        router = self._chooser(layer)
        product = router.logits

        def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            unit = Unit(result=product(x, weight), inputs=(x,), weight=weight.detach(), head_dim=1)
            return in_place_of(formula, unit)

        self._hooks.replace(router, "logits", logits)

    def change_choice(self, layer: int, choose: Choose) -> None:
        choose_on_kernels(self._hooks, self._chooser(layer), choose)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        def weigh(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return change(Routing(logits=logits, chosen=ids.long(), weights=weights))

        self._hooks.replace(self._chooser(layer), "rlk_weigh", weigh)

    def leave_out(self, layer: int, expert: int) -> None:
        experts = self._computer(layer)
        compute = experts.compute

        def without(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *rest: Any) -> Any:
            return compute(x, weights.masked_fill(ids == expert, 0), ids, *rest)

        self._hooks.replace(experts, "compute", without)
