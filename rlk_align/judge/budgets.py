"""Finds the budget of an operator: that of the side's dtype, for rows of the operator's width."""

from functools import cache

from rlk_align.judge.chance import by_width, narrow_row_gain
from rlk_align.judge.contract import STATISTICS, Budget, Contract
from rlk_align.judge.load import BY_DTYPE, open_contract
from rlk_align.results import RefereedUnit


def budget_of(contract: Contract, unit: RefereedUnit) -> Budget | None:
    """Returns the contract's budget for an operator. A side whose dtype the contract does not cover
    is judged by the built-in contract of that dtype. Returns None where the contract has no
    budgets, and where no built-in contract covers the dtype."""
    if not contract.budgets or unit.dtype in ("", *contract.dtypes):
        return contract.budget(unit.op, unit.op_class)
    if unit.dtype not in BY_DTYPE:
        return None
    return _built_in(BY_DTYPE[unit.dtype]).budget(unit.op, unit.op_class)


def exceeded(contract: Contract, unit: RefereedUnit) -> list[str]:
    """Lists the statistics of an operator that exceed its budget; empty where it has no budget."""
    bounds = bounds_of(contract, unit)
    if bounds is None or unit.errors is None:
        return []
    # `not <=`: a NaN is over any budget.
    return [n for n in STATISTICS if not abs(getattr(unit.errors, n)) <= bounds[n]]


def bounds_of(contract: Contract, unit: RefereedUnit) -> dict[str, float] | None:
    """Returns the largest value that each statistic of an operator may have. Where the contract
    says so, the bounds on the rms and the gain of a row depend on the width of the rows. Returns
    None where the operator has no budget."""
    budget = budget_of(contract, unit)
    if budget is None:
        return None
    bounds = {name: float(getattr(budget, name)) for name in STATISTICS}
    if budget.row_rms_by_width and unit.errors is not None:
        bounds["row_rms"] *= by_width(unit.errors.features, unit.rows)
        if budget.row_gain:
            bounds["row_gain"] += narrow_row_gain(unit.errors.features)
    return bounds


@cache
def _built_in(name: str) -> Contract:
    return open_contract(name)
