"""probe.json: what the graft passes of a run said, and its passes with replayed routing."""

from typing import Literal

from rlk_align.probe.attribution_record import Attribution
from rlk_align.probe.perturbation_record import Amplification
from rlk_align.probe.unit_record import Unit
from rlk_align.results import Count, EdgeMetrics, EdgeName, Result, SideName, Size


class ProbedEdge(Result):
    """One edge."""

    name: EdgeName
    units: list[Unit]
    """In execution order."""
    amplification: Amplification | None
    """The response of the edge's second engine; None where it was not perturbed."""
    attribution: Attribution | None
    """The attribution; None where it was not asked for."""

    @property
    def introducers(self) -> list[Unit]:
        return [u for u in self.units if u.label == "introducer"]


class ReplayedEdge(Result):
    """One edge of a sparse model, whose second engine has computed the first one's experts.

    Δ of the edge is that of `rest` plus that of `routing`, token by token.
    """

    name: EdgeName
    side: SideName
    """The side whose engine has computed the other pass's experts."""
    rows: Count
    """Choices of experts, of a token in a layer, that were replaced or confirmed."""
    rest: EdgeMetrics
    """The first pass against the replayed one: drift without routing."""
    routing: EdgeMetrics
    """The replayed pass against the one with its own choice."""
    mean_abs_rest_flipped: Size
    """Mean |Δ| of `rest` over the sampled tokens that are sent to other experts without replay."""
    mean_abs_rest_other: Size


class Probe(Result):
    """What a probe found of a run."""

    schema_id: Literal["rlk-align/probe/1"] = "rlk-align/probe/1"
    edges: list[ProbedEdge]
    left_out: str = ""
    """Why there are no graft passes: an engine, or the model, is not here."""
    replays: tuple[ReplayedEdge, ...] = ()
    """The edges on which tokens are sent to other experts, where routing was replayed."""

    def edge(self, name: EdgeName) -> ProbedEdge | None:
        return next((e for e in self.edges if e.name == name), None)

    def replay(self, name: EdgeName) -> ReplayedEdge | None:
        return next((e for e in self.replays if e.name == name), None)
