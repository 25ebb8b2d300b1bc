"""The parameters of an engine's model, by its table of places and the catalogue, and the canonical
parameters, or slices of them, that each rank has in them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlk_align.engines.common.layout import Layout, even, whole
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an engine's model, and the canonical parameters that it consists of."""

    name: str
    """Its name in the model, e.g. `decoder.layers.0.self_attention.linear_qkv.weight`."""
    layout: Layout
    dim: int | None
    """The dimension that the layout divides; None if every rank has a whole copy."""


_BY_FEATURE = ("linear", "short_conv", "decay", "time_step", "step_decay")
"""Formulas whose weights have rows for the features of the output, in its layout."""


def parameters(
    places: Iterable[Place], shape: ModelShape, tp: int, vocabulary: Callable[[str], Layout]
) -> Iterator[Parameter]:
    """Every parameter of a model, with a bias wherever a checkpoint may have one.

    `vocabulary`: returns the layout of the embedding or the head, by its canonical name.
    """
    for place in places:
        operator = shape.operator_of(place.sites[0])
        has_weight = bool(operator.weight or place.parameters_in)
        if not has_weight or (place.end == "inside" and not place.parameters_in):
            # The engine itself reads what is inside a module, such as the experts.
            continue
        site, name = place.sites[0], operator.parameter or place.sites[0]
        of = shape.of_site(site)
        weight, bias = f"{place.holder}.{place.weight}", f"{place.holder}.{place.bias}"
        match operator.sharding.axis:
            case "vocabulary":
                yield Parameter(weight, vocabulary(name), 0)
            case "row" if place.shares_outputs:
                outputs = even(site, of.size(operator.features), tp)
                yield Parameter(weight, outputs, 0)
                yield Parameter(bias, outputs.named(".bias"), 0)
            case "row":
                yield Parameter(weight, even(site, of.size(operator.weight[1]), tp), 1)
                # The bias is added after the ranks' partial sums: each rank has all of it.
                whole_bias = whole(f"{site}.bias", of.size(operator.features), tp)
                yield Parameter(bias, whole_bias, None)
            case "column" | "head" if operator.formula in _BY_FEATURE:
                assert place.layout is not None, place.sites
                yield Parameter(weight, place.layout, 0)
                yield Parameter(bias, place.layout.named(".bias"), 0)
            case "head" if operator.formula == "latent_attention":
                # The weight that expands latents has rows for keys and values of each head.
                yield Parameter(weight, even(site, of.size(operator.weight[0]), tp), 0)
            case "none" if place.layout is not None:
                # Several operators of which each rank has all.
                yield Parameter(weight, place.layout, 0)
                yield Parameter(bias, place.layout.named(".bias"), 0)
            case _:
                # Attention has a weight only beside sinks, of which there is one for each head.
                size = operator.weight[0] if operator.weight else "heads"
                layout = whole(site, of.size(size), tp)
                yield Parameter(weight, layout, None)
                # Some norms have one.
                yield Parameter(bias, layout.named(".bias"), None)


def canonical(
    plan: Iterable[Parameter],
    live: Callable[[str], torch.Tensor | None],
    gather: Callable[[torch.Tensor], list[torch.Tensor] | None],
) -> Iterator[LiveParameter]:
    """The canonical parameters of the live model; called on every rank.

    `live`: returns this rank's parameter by its name in the model; None if a patch removed it, and
    the parity check then names the missing parameter. `gather`: returns the tensors of all ranks on
    a rank that records them.
    """
    for entry in plan:
        local = live(entry.name)
        parts = None if local is None else gather(local)
        if parts is None:
            continue
        for op in entry.layout.ops:
            if entry.dim is None:
                yield LiveParameter(op, parts[0], replicas=tuple(parts[1:]))
            else:
                assembled = entry.layout.assemble(op, parts, entry.dim)
                yield LiveParameter(op, assembled, entry.layout.shards(op, entry.dim))


def shared_evenly(name: str, local: torch.Tensor, dim: int, ranks: Ranks) -> LiveParameter:
    """A parameter of which each rank has an equal slice along `dim`."""
    layout = even(name, local.shape[dim] * ranks.world, ranks.world)
    parts = all_gather(local, ranks)
    return LiveParameter(name, layout.assemble(name, parts, dim), layout.shards(name, dim))


def write_part(
    entry: Parameter, name: str, rank: int, whole: torch.Tensor, live: torch.Tensor
) -> None:
    """Overwrites a rank's live parameter with its slice of a whole canonical one."""
    if entry.dim is None:
        live.copy_(whole)
        return
    for at, piece in entry.layout.local(rank):
        if piece.op == name:
            part = whole.narrow(entry.dim, piece.start, piece.size)
            live.narrow(entry.dim, at, piece.size).copy_(part)


def unfused(model: Any, places: Iterable[Place]) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical parameters of a live model of transformers on one rank."""
    for place in places:
        if len(place.sites) > 1:
            yield from _of_fused(model.get_submodule(place.holder), place)
            continue
        (site,) = place.sites
        operator, module = OPERATORS[site.rpartition(".")[2]], model.get_submodule(place.holder)
        name = operator.parameter or site
        if not (operator.weight or place.parameters_in):
            continue
        # A patch may have removed the weight: the parity check then names the missing parameter.
        if isinstance(weight := getattr(module, place.weight, None), torch.Tensor):
            yield name, weight.detach()
        if (bias := getattr(module, place.bias, None)) is not None:
            yield f"{name}.bias", bias.detach()


def _of_fused(module: Any, place: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of each operator of a module that computes several."""
    assert place.layout is not None, place.sites
    for suffix, name in (("", "weight"), (".bias", "bias")):
        if isinstance(value := getattr(module, name, None), torch.Tensor):
            for op in place.layout.ops:
                yield f"{op}{suffix}", place.layout.assemble(op, [value.detach()], 0)
