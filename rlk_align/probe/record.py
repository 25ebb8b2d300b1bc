"""probe.json: the results of a run's graft passes and of its passes with replayed routing."""

from typing import Literal

from rlk_align.probe.attribution_record import Attribution
from rlk_align.probe.perturbation_record import Amplification
from rlk_align.probe.unit_record import Unit
from rlk_align.results import Count, EdgeMetrics, EdgeName, Result, SideName, Size


class ProbedEdge(Result):
    """The results for one edge."""

    name: EdgeName
    units: list[Unit]
    """In execution order."""
    amplification: Amplification | None
    """The response of the edge's second engine; None if it was not perturbed."""
    attribution: Attribution | None
    """None if no attribution was requested."""

    @property
    def introducers(self) -> list[Unit]:
        return [u for u in self.units if u.label == "introducer"]


class ReplayedEdge(Result):
    """One edge of a sparse model, whose second engine computed the first one's choice of experts.

    Δ of the edge is Δ of `rest` plus Δ of `routing`, token by token.
    """

    name: EdgeName
    side: SideName
    """The side whose engine computed the experts of the other pass."""
    rows: Count
    """Choices of a token's experts in a layer that were replaced or confirmed."""
    rest: EdgeMetrics
    """The first pass against the replayed one: the drift without routing."""
    routing: EdgeMetrics
    """The replayed pass against the pass in which the second engine chose the experts."""
    mean_abs_rest_flipped: Size
    """Mean |Δ| of `rest` over the sampled tokens that go to other experts without replay."""
    mean_abs_rest_other: Size


class Probe(Result):
    """The result of probing a run."""

    schema_id: Literal["rlk-align/probe/1"] = "rlk-align/probe/1"
    edges: list[ProbedEdge]
    left_out: str = ""
    """Why there are no graft passes, e.g. because an engine or the model is not on this machine."""
    replays: tuple[ReplayedEdge, ...] = ()
    """The edges on which tokens go to other experts, if routing was replayed."""

    def edge(self, name: EdgeName) -> ProbedEdge | None:
        return next((e for e in self.edges if e.name == name), None)

    def replay(self, name: EdgeName) -> ReplayedEdge | None:
        return next((e for e in self.replays if e.name == name), None)
