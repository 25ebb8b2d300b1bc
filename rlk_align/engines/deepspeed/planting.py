"""Where the operators of a live model lie under ZeRO, for a planted fault to stand in for one."""

from typing import Any

import torch

from rlk_align.engines.common.places import Place
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.planting import HFOperators
from rlk_align.errors import BadOption
from rlk_align.model.operators import OPERATORS
from rlk_align.selftest.faults.catalogue import Chosen
from rlk_align.selftest.planting.live_operators import LiveOperators, plant
from rlk_align.selftest.planting.operands import Formula
from rlk_align.selftest.planting.rank import Sharing


class ZeroOperators(HFOperators):
    """HF's, whose parameters ranks may share."""

    def __init__(self, engine: Any, chosen: Chosen) -> None:
        # Each rank computes whole operators, of samples of its own.
        super().__init__(engine, chosen, Sharing(rank=engine.ranks.rank))

    def parameter(self, name: str) -> torch.Tensor:
        place = self._holder(name)
        module = self._model.get_submodule(place.module)
        with self._engine.gathered(module.parameters(recurse=False)):
            return dict(unfused(self._model, [place]))[name].clone()

    def _holder(self, name: str) -> Place:
        for site, place in self._places.items():
            operator = OPERATORS[site.rpartition(".")[2]]
            if operator.weight and (operator.parameter or site) == name.removesuffix(".bias"):
                return place
        raise AssertionError(name)

    def change_weight(self, site: str, change: Formula) -> None:
        if self._engine.shards_parameters and self._chosen.rank is not None:
            raise BadOption(
                f"fault={self._chosen}: with stage=3 ranks share this weight",
                "leave @rank out, or choose another stage",
            )
        before = self.parameter(site)
        if self.faulty:
            self._write(site, change(before.clone()))
            self.callback(self._write, site, before)

    def _write(self, site: str, value: torch.Tensor) -> None:
        module = self._model.get_submodule(self._holder(site).module)
        with self._engine.gathered(module.parameters(recurse=False), written=True):
            module.weight.detach().copy_(value)


def plant_fault(engine: Any, chosen: Chosen) -> LiveOperators:
    """Into the live model of this process."""
    return plant(ZeroOperators(engine, chosen), chosen)
