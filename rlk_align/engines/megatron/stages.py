"""The part of a model that one rank has: the layers of its pipeline stage, and its experts.

megatron-core numbers the layers of a stage and the experts of a rank from 0; sites and parameters
have the numbers of the whole model.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlk_align.engines.common.places import Place

_LAYER = re.compile(r"^(layers|decoder\.layers)\.([0-9]+)")
_EXPERT = re.compile(r"\b(local_experts)\.([0-9]+)")
_OF_EXPERT = re.compile(r"\.experts\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, which divide the layers of a model equally. With virtual stages a rank
    has several: those whose numbers are apart by the number of ranks in the pipeline."""

    number: int
    count: int
    layers: int
    experts: range = range(0)
    """The experts of each sparse layer that this rank has."""

    @property
    def share(self) -> int:
        return self.layers // self.count

    @property
    def first(self) -> int:
        """The stage's first layer."""
        return self.number * self.share

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def computes(self, site: str) -> bool:
        """Whether this stage computes a site."""
        return self.of(site) == self.number

    def of(self, site: str) -> int:
        """The stage that computes a site."""
        if found := _LAYER.match(site):
            return int(found[2]) // self.share
        return 0 if site == "embed" else self.count - 1

    def holds(self, parameter: str) -> bool:
        """Whether this rank has a canonical parameter or a part of it."""
        found = _OF_EXPERT.search(parameter)
        return self.computes(parameter) and (not found or int(found[1]) in self.experts)

    def local(self, path: str) -> str:
        """The name that a module or parameter of the whole model has in this rank's."""
        return self._moved(path, -1)

    def whole(self, path: str) -> str:
        """The name that a module or parameter of this rank has in the whole model."""
        return self._moved(path, 1)

    def places(self, places: "Iterable[Place]") -> "list[Place]":
        """The places of this stage's sites, with the names of its modules."""
        return [
            replace(p, module=self.local(p.module), parameters_in=self.local(p.parameters_in))
            for p in places
            if self.computes(p.sites[0])
        ]

    def _moved(self, path: str, way: int) -> str:
        path = _renumbered(_LAYER, path, way * self.first)
        return _renumbered(_EXPERT, path, way * self.experts.start)


def _renumbered(numbered: re.Pattern[str], path: str, by: int) -> str:
    return numbered.sub(lambda found: f"{found[1]}.{int(found[2]) + by}", path)
