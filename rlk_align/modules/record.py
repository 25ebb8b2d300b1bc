"""The result of a comparison module by module, as frozen records; needs no torch."""

from typing import Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE
from rlk_align.judge.budgets import exceeded
from rlk_align.judge.contract import Contract
from rlk_align.results import (
    Controls,
    Count,
    EdgeMetrics,
    EngineRecord,
    RefereedUnit,
    Result,
    SideName,
)


class ChangedWeight(Result):
    """A tensor of the checkpoint of which a live engine has other values."""

    side: SideName
    tensor: str
    """Its name in the checkpoint."""
    live: str
    """The engine's parameter."""
    changed: Count
    """The rows with other values; of a vector, the entries."""
    rows: Count


class SideWeights(Result):
    """How the weights of one side were paired with the checkpoint's tensors."""

    found: Count
    """The tensors that a parameter of the engine holds."""
    missing: list[str]
    """The tensors that no parameter of the engine holds."""
    strays: list[str]
    """Parameters of the engine whose values are in no tensor."""


class Unjudged(Result):
    """A module of one side that could not be judged."""

    side: SideName
    module: str
    """Its name in the checkpoint; in the engine, for a module that holds none of its tensors."""
    kind: str
    """Its class by transformers' code, or in the engine."""
    reason: str


class ModulesReport(Result):
    """What was found in the modules of two engines."""

    model: str
    """The checkpoint that both sides are compared with."""
    described: bool
    """Whether its family is described, so that operators can be compared instead."""
    engines: dict[SideName, EngineRecord]
    tensors: Count
    """The number of the checkpoint's tensors."""
    weights: dict[SideName, SideWeights]
    changed: list[ChangedWeight]
    units: list[RefereedUnit]
    """The modules that were recomputed, in the order of the model."""
    unjudged: list[Unjudged]
    drift: EdgeMetrics
    controls: Controls


class ModulesVerdict(Result):
    """A report, judged by the budgets of a contract. It is never a pass: what is inside unknown
    modules and between modules is not judged."""

    report: ModulesReport
    contract: Contract

    @property
    def over(self) -> list[RefereedUnit]:
        """The modules beyond their budgets."""
        return [u for u in self.report.units if exceeded(self.contract, u)]

    @property
    def exit_code(self) -> int:
        return EXIT_FAIL if self.over or self.report.changed else EXIT_INCONCLUSIVE

    @property
    def status(self) -> Literal["fail", "inconclusive"]:
        return "fail" if self.exit_code == EXIT_FAIL else "inconclusive"
