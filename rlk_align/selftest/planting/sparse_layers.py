"""The sparse layers of a live model, as planted faults change them.

Every change is undone with the hooks that it is made by.
N = rows, E = experts, K = experts of a row
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose, choose_on_kernels
from rlk_align.engines.common.hooks import Hooks
from rlk_align.selftest.planting.operands import Formula, Unit, in_place_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The choice of one layer, as its router gives it."""

    logits: torch.Tensor
    """`[N, E]`."""
    chosen: torch.Tensor
    """int64 `[N, K]`."""
    weights: torch.Tensor
    """`[N, K]`."""


class SparseLayers(ABC):
    """The sparse layers of one engine."""

    @abstractmethod
    def change_logits(self, layer: int, formula: Formula) -> None:
        """`formula(Unit)` in place of the router's logits, by which experts are chosen then."""

    @abstractmethod
    def change_choice(self, layer: int, choose: Choose) -> None:
        """`choose(scores, chosen)` in place of the router's own choice."""

    @abstractmethod
    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        """`change(routing)`, `[N, K]`, in place of the weights of the chosen experts."""

    @abstractmethod
    def leave_out(self, layer: int, expert: int) -> None:
        """Leaves that expert's rows out of the sums."""

    @abstractmethod
    def swap_experts(self, layer: int, one: int, other: int) -> None:
        """Two experts have each other's first weights."""

    def weigh_before_activation(self, layer: int) -> None:
        """An expert's weight multiplies its gate, and not its row."""
        raise NotImplementedError


def swap(hooks: Hooks, one: torch.Tensor, other: torch.Tensor) -> None:
    """Two live tensors have each other's values, until the hooks come out."""
    before = one.clone(), other.clone()
    one.copy_(before[1])
    other.copy_(before[0])
    hooks.callback(one.copy_, before[0])
    hooks.callback(other.copy_, before[1])


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
