"""probe.json: what the graft passes of a run said."""

from typing import Literal

from rlk_align.probe.effects import Amplification, Attribution
from rlk_align.probe.units import Unit
from rlk_align.results import EdgeName, Result


class ProbedEdge(Result):
    """One edge."""

    name: EdgeName
    units: list[Unit]
    """In execution order."""
    amplification: Amplification | None
    """The response of the edge's second engine; None where it was not perturbed."""
    attribution: Attribution | None
    """None where it was not asked for."""

    @property
    def introducers(self) -> list[Unit]:
        return [u for u in self.units if u.label == "introducer"]


class Probe(Result):
    """What a probe found of a run."""

    schema_id: Literal["rlk-align/probe/1"] = "rlk-align/probe/1"
    edges: list[ProbedEdge]
    left_out: str = ""
    """Why there are no graft passes: an engine, or the model, is not here."""

    def edge(self, name: EdgeName) -> ProbedEdge | None:
        return next((e for e in self.edges if e.name == name), None)
