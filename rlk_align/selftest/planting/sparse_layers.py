"""The changes that planted faults make to the sparse layers of a live model.

Every change is undone when its hooks are removed.
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
    """The result of one layer's router."""

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
        """Replaces the router's logits by `formula(Unit)`; experts are then chosen by these."""

    @abstractmethod
    def change_choice(self, layer: int, choose: Choose) -> None:
        """Replaces the router's choice by `choose(scores, chosen)`."""

    @abstractmethod
    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        """Replaces the weights of the chosen experts by `change(routing)`, `[N, K]`."""

    @abstractmethod
    def leave_out(self, layer: int, expert: int) -> None:
        """Omits the rows of this expert from the sums."""

    @abstractmethod
    def swap_experts(self, layer: int, one: int, other: int) -> None:
        """Swaps the first weights of two experts."""

    def leave_out_gate(self, layer: int) -> None:
        """Adds the shared expert's row without its gate."""
        raise NotImplementedError

    def drop_biases(self, layer: int) -> None:
        """Computes the experts without their biases."""
        raise NotImplementedError

    def leave_out_clamp(self, layer: int) -> None:
        """Computes the experts without the limit of what they activate."""
        raise NotImplementedError

    def weigh_before_activation(self, layer: int) -> None:
        """Multiplies an expert's gate by its weight, instead of its row."""
        raise NotImplementedError


def without_gate(hooks: Hooks, expert: Any, weight: Callable[[], torch.Tensor]) -> None:
    """Divides the row of a shared expert by the sigmoid of its gate, whose weight `[1, F]` this
    returns while the layer runs, as if no engine multiplied the row by it."""

    def see(_module: Any, inputs: Any, row: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.linear(inputs[0].float(), weight().float()).sigmoid()
        return (row.float() / gate).to(row.dtype)

    hooks.after(expert, see)


def swap(hooks: Hooks, one: torch.Tensor, other: torch.Tensor) -> None:
    """Swaps the values of two live tensors until the hooks are removed."""
    before = one.clone(), other.clone()
    one.copy_(before[1])
    other.copy_(before[0])
    hooks.callback(one.copy_, before[0])
    hooks.callback(other.copy_, before[1])


class KernelLayers(SparseLayers):
    """The sparse layers of an engine with the kernels. A subclass for each engine finds the
    experts' weights."""

    _hooks: Hooks

    @abstractmethod
    def _chooser(self, layer: int) -> Any:
        """The object that chooses experts with the kernels."""

    @abstractmethod
    def _computer(self, layer: int) -> Any:
        """The object that computes experts with the kernels and adds up their rows."""

    def change_logits(self, layer: int, formula: Formula) -> None:
        router = self._chooser(layer)
        product = router.logits

        def logits(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            unit = Unit(
                result=product(x, weight, bias),
                inputs=(x,),
                weight=weight.detach(),
                bias=bias,
                head_dim=1,
            )
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
