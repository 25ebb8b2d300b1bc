"""A comparison module by module, for programs: `rlk-align/modules/1`."""

from typing import Any

from rlk_align.judge.budgets import bounds_of, budget_of, exceeded
from rlk_align.judge.contract import Contract
from rlk_align.modules.record import ModulesVerdict
from rlk_align.report.verdict_json import contract_json, finite
from rlk_align.results import RefereedUnit

SCHEMA = "rlk-align/modules/1"


def modules_json(verdict: ModulesVerdict) -> dict[str, Any]:
    """Returns the verdict as a tree of JSON values; a NaN or an infinity becomes null."""
    r, contract = verdict.report, verdict.contract
    return finite(
        {
            "schema": SCHEMA,
            "status": verdict.status,
            "exit_code": verdict.exit_code,
            "contract": contract_json(contract),
            "model": r.model,
            "engines": {side: e.model_dump() for side, e in r.engines.items()},
            "tensors": r.tensors,
            "weights": {side: w.model_dump() for side, w in r.weights.items()},
            "changed_weights": [c.model_dump() for c in r.changed],
            "over_budget": [_over_json(u, contract) for u in verdict.over],
            "judged": [_unit_json(u, contract) for u in r.units],
            "unjudged": [u.model_dump() for u in r.unjudged],
            "drift": r.drift.model_dump(exclude={"noise"}),
            "controls": r.controls.model_dump(),
        }
    )


def _unit_json(unit: RefereedUnit, contract: Contract) -> dict[str, Any]:
    budget = budget_of(contract, unit)
    return {
        "module": unit.site,
        "side": unit.side,
        "rows": unit.rows,
        "rms": unit.errors.rms if unit.errors else None,
        "budget": budget.id if budget else None,
    }


def _over_json(unit: RefereedUnit, contract: Contract) -> dict[str, Any]:
    return _unit_json(unit, contract) | {
        "exceeded": exceeded(contract, unit),
        "bounds": bounds_of(contract, unit),
        "errors": unit.errors.model_dump() if unit.errors else None,
        "code": unit.code.model_dump() if unit.code else None,
    }
