"""The operators of a live decoder that fuses some of them, as vLLM and SGLang do: q, k, v and gate,
up are one product, and a norm adds the residual."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from rlk_align.engines.common.products import Method
from rlk_align.engines.common.weights import Parameter, canonical, write_part
from rlk_align.selftest.planting.live_operators import LiveOperators
from rlk_align.selftest.planting.operands import Formula, Unit, in_place_of


class FusedOperators(LiveOperators):
    """A subclass for each engine lists the parameters of its model."""

    norms_add = True

    @abstractmethod
    def plan(self) -> Iterable[Parameter]:
        """Every parameter of the model."""

    @abstractmethod
    def tensor(self, path: str) -> torch.Tensor | None:
        """This rank's tensor at a path that the model computes with; None if there is none."""

    @abstractmethod
    def method(self, path: str) -> Method:
        """The method that computes the product with the parameter at a path."""

    def parameter(self, name: str) -> torch.Tensor:
        every = canonical(self._entries(name), self.tensor, self._sharing.gather)
        return next(p.value for p in every if p.name == name).detach()

    def live(self, name: str) -> tuple[torch.Tensor, Parameter]:
        entry = self._entries(name)[0]
        return self._model.get_parameter(entry.name).detach(), entry

    def change_copy(self, site: str, change: Formula) -> None:
        name = self.sites[site].operator.parameter or site
        changed, entry = change(self.parameter(name)), self._entries(name)[0]
        local = self.tensor(entry.name)
        if not self.faulty or local is None:
            return
        copy = local.detach().clone()
        write_part(entry, name, self._sharing.rank, changed, copy)
        owner, method = self.method(entry.name)
        original = getattr(owner, method)

        def product(module: Any, x: torch.Tensor, bias: Any = None, **more: Any) -> torch.Tensor:
            y = x.float() @ copy.float().T
            y = y if bias is None else y + bias.float()
            return y.to(original(module, x, bias, **more).dtype)

        self.replace(owner, method, product)

    def _entries(self, name: str) -> list[Parameter]:
        return [entry for entry in self.plan() if name in entry.layout.ops]

    def _combination(self, site: str, formula: Formula) -> None:
        if self.sites[site].operator.formula != "residual" or not self.norms_add:
            super()._combination(site, formula)
            return
        module = self.module(site)
        original = module.forward

        def forward(branch: torch.Tensor, stream: torch.Tensor, *more: Any) -> Any:
            operands = (stream.clone(), branch.clone())
            _, result = original(branch, stream, *more)
            width, rows = self.shape.head_dim, self.rows
            unit = Unit(result=result, inputs=operands, head_dim=width, rows=rows)
            new = in_place_of(formula, unit) if self.faulty else result
            return original(new.clone()), new

        self.replace(module, "forward", forward)
