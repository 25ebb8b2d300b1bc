"""Where the canonical operators lie in a live model: one table for each engine.

Code that observes or overwrites a site, reads live parameters or an attribute, plants a fault or
asks what can be covered uses the operator's line in that table.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlk_align.engines.common.layout import Layout


def first(value: Any) -> torch.Tensor:
    """The tensor of a module that returns one, alone or ahead of others."""
    return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Access:
    """How a site's tensor is reached in what a module takes or gives."""

    read: Callable[[Any], torch.Tensor]
    """The site's value."""
    target: Callable[[Any], torch.Tensor]
    """The tensor to overwrite, so that all that follows reads the new value."""
    after_write: Callable[[Any], Any]
    """What the module returns once that is overwritten."""


def with_bias(value: Any) -> torch.Tensor:
    """A tensor, with the bias that comes beside it for whatever follows to add."""
    bias = value[1] if isinstance(value, tuple) else None
    return first(value) if bias is None else first(value) + bias


def _without_bias(value: Any) -> Any:
    return (value[0], None) if isinstance(value, tuple) else value


FIRST = Access(first, first, lambda value: value)
"""The tensor itself, or the first of several."""
SECOND = Access(lambda value: value[1], lambda value: value[1], lambda value: value)
"""The second of several: the residual stream that a fused norm returns."""
WITH_BIAS = Access(with_bias, first, _without_bias)
"""A tensor and a bias that whatever follows adds: what is overwritten has it added already."""


End = Literal["input", "output", "rope", "inside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one operator lies, or several that are fused."""

    sites: tuple[str, ...]
    module: str
    """The module's path below the model."""
    end: End = "output"
    """The module's first input, its output, or what the rotary embedding gives while that module,
    an attention, runs: first the query, then the key. What lies inside a module the engine tells by
    `SiteHooks.show`, and it is not overwritten."""
    access: Access = FIRST
    layout: Layout | None = None
    """Which features each rank holds; None where each holds them all."""
    rows: Literal["all", "sampled"] = "all"
    """Whether it has a row for each token, or for those alone whose next one was sampled."""
    shares_outputs: bool = False
    """Whether each rank has rows of a weight that engines otherwise share by its columns."""
    parameters_in: str = ""
    """The path of what holds its parameters, where that is another module."""
    weight: str = "weight"
    """The name of its weight there."""
    unexposed: str = ""
    """Why its value can neither be read nor written; empty where it can."""

    @property
    def holder(self) -> str:
        """The path of the module that holds its parameters, where it has any."""
        return self.parameters_in or self.module


def shards_of(places: Iterable[Place]) -> dict[str, list[tuple[int, int, int]]]:
    """Site -> (rank, first feature, feature after the last), of the sites whose features ranks
    share."""
    shared = [(site, p.layout) for p in places if p.layout is not None for site in p.sites]
    shards = {
        site: [(s.rank, s.start, s.stop) for s in layout.shards(site, 1)] for site, layout in shared
    }
    return {site: held for site, held in shards.items() if held}
