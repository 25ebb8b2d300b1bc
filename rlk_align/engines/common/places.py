"""Where the canonical operators are in a live model: one table for each engine.

Code that observes or overwrites a site, reads live parameters or an attribute, plants a fault, or
determines the coverage uses the operator's line in that table.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rlk_align.engines.common.layout import Layout
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape


def first(value: Any) -> torch.Tensor:
    """The tensor that a module returns, alone or as the first of several values."""
    return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a site's tensor in the input or the output of a module."""

    read: Callable[[Any], torch.Tensor]
    """The site's value."""
    target: Callable[[Any], torch.Tensor]
    """The tensor to overwrite, so that all later operators read the new value."""
    after_write: Callable[[Any], Any]
    """The module's output after that tensor was overwritten."""


def with_bias(value: Any) -> torch.Tensor:
    """The sum of a tensor and the bias that the module returns beside it, if it returns one."""
    bias = value[1] if isinstance(value, tuple) else None
    return first(value) if bias is None else first(value) + bias


def _without_bias(value: Any) -> Any:
    return (value[0], None) if isinstance(value, tuple) else value


FIRST = Access(first, first, lambda value: value)
"""The tensor itself, or the first of several."""
SECOND = Access(lambda value: value[1], lambda value: value[1], lambda value: value)
"""The second of several: the residual stream that a fused norm returns."""
WITH_BIAS = Access(with_bias, first, _without_bias)
"""A tensor and a bias that a later operator adds: the value to overwrite includes the bias."""


HEADS_FIRST = Access(
    lambda value: value.transpose(1, 2), lambda value: value.transpose(1, 2), lambda value: value
)
"""`[B, heads, T, head_dim]`: heads before tokens."""


def _by_pair(value: torch.Tensor) -> torch.Tensor:
    return value.unflatten(-1, (2, -1)).transpose(-1, -2)


HALVES = Access(_by_pair, _by_pair, lambda value: value)
"""Rotated pairs of features 2j and 2j + 1 of a head, of which the first features come before the
second ones."""


LOGITS = Access(lambda value: value.logits, lambda value: value.logits, lambda value: value)
"""The logits in what a whole model of transformers returns."""


End = Literal["input", "output", "rope", "inside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one operator, or several fused ones, are in a live model."""

    sites: tuple[str, ...]
    module: str
    """The module's path in the model."""
    end: End = "output"
    """Where the value is: the module's first input, its output, or the output of the rotary
    embedding while the module, an attention, runs (first the query, then the key). The engine
    passes a value inside a module to `SiteHooks.show`; such a value is not overwritten."""
    access: Access = FIRST
    layout: Layout | None = None
    """Which features each rank has; None if each rank has all features."""
    rows: Literal["all", "sampled"] = "all"
    """Whether it has a row for each token, or only for tokens whose next token was sampled."""
    shares_outputs: bool = False
    """Whether each rank has rows of a weight whose columns engines otherwise share."""
    parameters_in: str = ""
    """The path of the module with its parameters, if that is another module."""
    weight: str = "weight"
    """The name of its weight there."""
    bias: str = "bias"
    """The name of its bias there."""
    unexposed: str = ""
    """Why its value can neither be read nor overwritten; empty if it can."""

    @property
    def holder(self) -> str:
        """The path of the module with its parameters."""
        return self.parameters_in or self.module


def embedding_place(shape: ModelShape, scaled_outside: bool = False) -> Place:
    """The place of the embedding in the code of transformers. A number of the config multiplies it
    outside of any module, before the first operator of layer 0; `scaled_outside`: so does the
    family's scale."""
    table = shape.family.modules.get("embed", OPERATORS["embed"].module)
    if not (scaled_outside or shape.family.multiplies("embed")):
        return Place(sites=("embed",), module=table)
    first = OPERATORS[shape.family.layer(shape, 0)[0]].module
    return Place(
        sites=("embed",), module=f"model.layers.0.{first}", end="input", parameters_in=table
    )


def final_norm_path(shape: ModelShape) -> str:
    """The path of the norm after the layers in the code of transformers."""
    return shape.family.modules.get("final_norm", OPERATORS["final_norm"].module)


def beside_sinks(place: Place, operators: Collection[str], attention: str) -> Place:
    """The place of an attention core in a layer with these operators; `attention`: the path of the
    module that has its sinks, if it has any."""
    if "sink_attn" not in operators:
        return place
    return replace(place, parameters_in=attention, weight=OPERATORS["sink_attn"].tensor)


def rescaled(place: Place, operators: Collection[str]) -> Place:
    """The place of the residual stream after a layer with these operators, beside the number by
    which it is multiplied, if it is."""
    record = OPERATORS["rescaled_mlp_residual"]
    if record.name not in operators:
        return place
    return replace(place, parameters_in=place.module, weight=record.tensor)


def shards_of(places: Iterable[Place]) -> dict[str, list[tuple[int, int, int]]]:
    """Site -> (rank, first feature, feature after the last), for sites that ranks share."""
    layouts = {site: p.layout for p in places if p.layout is not None for site in p.sites}
    return {
        site: [(s.rank, s.start, s.stop) for s in shards]
        for site, layout in layouts.items()
        if (shards := layout.shards(site, 1))
    }
