"""The result of a comparison module by module, as frozen records; needs no torch."""

from typing import Any, Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE
from rlk_align.judge.budgets import bounds_of, budget_of, exceeded
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

SCHEMA = "rlk-align/modules/1"


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

    def to_json(self) -> dict[str, Any]:
        """The verdict in the form of `--output json`; JSON lacks NaN and infinity, which are
        null."""
        r = self.report
        return {
            "schema": SCHEMA,
            "status": self.status,
            "exit_code": self.exit_code,
            "contract": {"id": self.contract.id, "version": self.contract.version},
            "model": r.model,
            "engines": {side: e.model_dump() for side, e in r.engines.items()},
            "tensors": r.tensors,
            "weights": {side: w.model_dump() for side, w in r.weights.items()},
            "changed_weights": [c.model_dump() for c in r.changed],
            "over_budget": [self._over_json(u) for u in self.over],
            "judged": [self._unit_json(u) for u in r.units],
            "unjudged": [u.model_dump() for u in r.unjudged],
            "drift": r.drift.model_dump(exclude={"noise"}),
            "controls": r.controls.model_dump(),
        }

    def _unit_json(self, unit: RefereedUnit) -> dict[str, Any]:
        budget = budget_of(self.contract, unit)
        return {
            "module": unit.site,
            "side": unit.side,
            "rows": unit.rows,
            "rms": unit.errors.rms if unit.errors else None,
            "budget": budget.id if budget else None,
        }

    def _over_json(self, unit: RefereedUnit) -> dict[str, Any]:
        return self._unit_json(unit) | {
            "exceeded": exceeded(self.contract, unit),
            "bounds": bounds_of(self.contract, unit),
            "errors": unit.errors.model_dump() if unit.errors else None,
            "code": unit.code.model_dump() if unit.code else None,
        }
