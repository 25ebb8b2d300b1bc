"""Which tensor of a module is which site.

Modules have the names of the checkpoint, which transformers, vLLM and SGLang use. A site is the
output of its own module, or the input of the module that reads it. Engines that fuse projections
have FUSED modules; those that add the residual inside the next norm return it beside the normed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import Site, model_sites
from rlk_align.record.imports.source import SITE, Tap

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Module -> the operators whose outputs it computes at once, in order. It is beside their own."""
ATTENTION = "attn"
"""The module whose inputs are q, k and v as attention reads them, beside the output projection."""
LOGITS = Tap("logits_processor", "output.0")
"""SGLang's logits, of which all ranks have all columns."""
NORMS = frozenset({"rms_norm", "layer_norm"})
MODULES = frozenset({"embedding", "linear", *NORMS})
"""Formulas whose module has the operator's own inputs and output."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tap with the values of a site."""

    tap: Tap
    sites: tuple[str, ...]
    """The sites whose features it has, one after the other."""
    given: Tap | None = None
    """A tap without which it has something else."""
    unless: Tap | None = None
    """A tap with which it has something else."""
    gathered: bool = False
    """Whether each tensor-parallel rank has all features."""


def places_of(shape: ModelShape) -> dict[str, list[Place]]:
    """Site -> its possible places, the first of which is taken that files have. Sites of sparse
    layers have none beside their own names, since engines compute other values there."""
    sites = {site.name: site for site in model_sites(shape)}
    paths = {name: path for name, site in sites.items() if (path := _path(site, shape))}
    places = {name: [Place(Tap(name, SITE), (name,))] for name in sites}
    for name, path in paths.items():
        site = sites[name]
        if not _changed_outside(site, shape):
            places[name].append(Place(Tap(path, "output.0"), (name,)))
        for module, ops in FUSED.items():
            fused = tuple(f"layers.{site.layer}.{op}" for op in ops)
            if name in fused and set(fused) <= sites.keys():
                places[name].append(Place(Tap(_beside(path, module), "output.0"), fused))
    for name, path in paths.items():
        site = sites[name]
        if len(site.inputs) == 1:
            read = site.inputs[0]
            places[read] += _read_by(site, path, sites[read])
            stream = sites[read]
            branch = stream.inputs[1:]
            adds = stream.operator.formula == "residual" and not stream.operator.multiplier
            if site.operator.formula in NORMS and adds and len(branch) == 1:
                # Ranks may add up their parts between the projection and the norm.
                # Its inputs are then the branch and the stream.
                added = Place(Tap(path, "input.0"), branch, given=Tap(path, "input.1"))
                places[branch[0]].insert(1, added)
    for site in sites.values():
        if site.operator.formula == "attention":
            output = next(s for s in sites.values() if s.layer == site.layer and s.op == "o_proj")
            module = _beside(paths[output.name], ATTENTION)
            for number, name in enumerate((*site.inputs, *site.prefix_inputs)):
                places[name].append(Place(Tap(module, f"input.{number}"), (name,)))
            places[site.name].append(Place(Tap(module, "output.0"), (site.name,)))
    places["logits"].append(Place(LOGITS, ("logits",), gathered=True))
    return places


def choose(places: Mapping[str, list[Place]], taps: Collection[Tap]) -> dict[str, Place]:
    """Site -> the place that is among these taps, for the sites that have one."""
    found = {}
    for site, possible in places.items():
        there = (
            p
            for p in possible
            if p.tap in taps and p.unless not in taps and (p.given is None or p.given in taps)
        )
        if (place := next(there, None)) is not None:
            found[site] = place
    return found


def _path(site: Site, shape: ModelShape) -> str:
    """The module of a site; empty if it has none whose values are certain."""
    operator = site.operator
    if site.sparse or operator.formula not in MODULES or operator.tensor != "weight":
        return ""
    module = shape.family.modules.get(operator.name, operator.module)
    return module if site.layer is None else f"model.layers.{site.layer}.{module}"


def _changed_outside(site: Site, shape: ModelShape) -> bool:
    """Whether the model multiplies or caps the output of a site's module outside of the module."""
    if site.operator.multiplier or (site.op == "logits" and shape.family.logit_cap):
        return True
    return bool(site.operator.formula == "embedding" and shape.family.embedding_scale)


def _read_by(reader: Site, path: str, site: Site) -> Iterator[Place]:
    """The places of a site at the module of its reader."""
    if reader.operator.formula in NORMS and site.operator.formula == "residual":
        yield Place(Tap(path, "output.1"), (site.name,))
    # A norm that adds the residual has the branch as its first input, and two of them.
    yield Place(Tap(path, "input.0"), (site.name,), unless=Tap(path, "input.1"))


def _beside(path: str, module: str) -> str:
    return ".".join((*path.split(".")[:-1], module))
