"""The units of one comparison: the outputs that are computed together, and their recorded inputs.

An operator is a unit. Two operators that an engine fuses are a region, which is one unit. An
operator that an engine cannot show is part of the units that read its output.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rlk_align.model.sites import Site


@dataclass(frozen=True, slots=True)
class UnitGraph:
    """An operator, or a region of two operators, with the sites that it reads."""

    name: str
    """The name of the site or of the region, e.g. `layers.3.attn_residual+mlp_norm`."""
    sites: tuple[Site, ...]
    """The unit's outputs that both engines show."""
    inputs: tuple[str, ...]
    """Sites of which the unit reads row p for its own row p."""
    prefix_inputs: tuple[str, ...]
    """Sites of which the unit reads every row up to and including p."""

    @property
    def is_region(self) -> bool:
        return "+" in self.name


def unit_graphs(
    sites: Iterable[Site], fused: Collection[tuple[str, str]], hidden: Collection[str]
) -> list[UnitGraph]:
    """Returns the units in execution order.

    `fused`: pairs of operators that one of the engines fuses; `hidden`: sites that one of the
    engines cannot show.
    """
    graph = {s.name: s for s in sites}
    partner = partners(graph, fused)
    units: list[UnitGraph] = []
    done: set[str] = set()
    for site in graph.values():
        if site.name in done:
            continue
        members = [site, *([graph[partner[site.name]]] if site.name in partner else [])]
        done |= {m.name for m in members}
        shown = tuple(m for m in members if m.name not in hidden)
        if not shown:
            continue
        inside = {m.name for m in members}
        reads = [n for m in members for n in m.inputs if n not in inside]
        prefixes = [n for m in members for n in m.prefix_inputs]
        units.append(
            UnitGraph(
                _name(shown),
                shown,
                _visible(reads, graph, partner, hidden),
                _visible(prefixes, graph, partner, hidden),
            )
        )
    return units


def late_sites(sites: Iterable[Site], fused: Collection[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the first operator of each region. Its output is overwritten only after the whole
    region has been computed."""
    return tuple(partners({s.name: s for s in sites}, fused))


def partners(graph: dict[str, Site], fused: Collection[tuple[str, str]]) -> dict[str, str]:
    """Returns the first site of each region -> the second one."""
    return {
        read: site.name
        for site in graph.values()
        for read in site.inputs
        if (graph[read].op, site.op) in fused
    }


def _visible(
    reads: Iterable[str], graph: dict[str, Site], partner: dict[str, str], hidden: Collection[str]
) -> tuple[str, ...]:
    """The sites that are read, with each hidden site replaced by the sites that it reads itself."""
    owner = {second: first for first, second in partner.items()}
    visible: list[str] = []
    for name in reads:
        if name not in hidden:
            visible.append(name)
            continue
        whole = graph[owner[name]] if name in owner else graph[name]
        visible += _visible([*whole.inputs, *whole.prefix_inputs], graph, partner, hidden)
    return tuple(dict.fromkeys(visible))


def _name(shown: tuple[Site, ...]) -> str:
    if len(shown) == 1:
        return shown[0].name
    one, two = shown
    return f"{one.name}+{two.op if two.layer == one.layer else two.name}"
