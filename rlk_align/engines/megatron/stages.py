"""The stages of a pipeline: which layers each has, and under which names. megatron-core numbers the
modules of a stage's layers from 0, and sites and parameters are named by the layers of the model.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlk_align.engines.common.places import Place

_LAYER = re.compile(r"^(layers|decoder\.layers)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count`, of a model of `layers` layers, which each has as many of."""

    number: int
    count: int
    layers: int

    @property
    def share(self) -> int:
        return self.layers // self.count

    @property
    def first(self) -> int:
        """Its first layer."""
        return self.number * self.share

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def computes(self, site: str) -> bool:
        """Whether a site is this stage's."""
        return self.of(site) == self.number

    def of(self, site: str) -> int:
        """The stage that computes a site."""
        if found := _LAYER.match(site):
            return int(found[2]) // self.share
        return 0 if site == "embed" else self.count - 1

    def local(self, path: str) -> str:
        """A module or parameter of the model, by its name in this stage."""
        return self._moved(path, -self.first)

    def whole(self, path: str) -> str:
        """One of this stage, by its name in the whole model."""
        return self._moved(path, self.first)

    def places(self, places: Iterable[Place]) -> list[Place]:
        """Those of its sites, by the names of its modules."""
        return [
            replace(p, module=self.local(p.module), parameters_in=self.local(p.parameters_in))
            for p in places
            if self.computes(p.sites[0])
        ]

    @staticmethod
    def _moved(path: str, by: int) -> str:
        return _LAYER.sub(lambda found: f"{found[1]}.{int(found[2]) + by}", path)
