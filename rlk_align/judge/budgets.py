"""Which budget a side's operator is held to: one of its own dtype, for rows of its own width."""

from functools import cache

from rlk_align.judge.chance import by_width, narrow_row_gain
from rlk_align.judge.contract import STATISTICS, Budget, Contract
from rlk_align.judge.load import BY_DTYPE, open_contract
from rlk_align.results import RefereedUnit


def budget_of(contract: Contract, unit: RefereedUnit) -> Budget | None:
    """The contract's budget for an operator. A side whose dtype the contract does not cover is
    judged by the built-in contract of that dtype. None where the contract has no budgets, or where
    no contract has one for that dtype."""
    if not contract.budgets or unit.dtype in ("", *contract.dtypes):
        return contract.budget(unit.op, unit.op_class)
    if unit.dtype not in BY_DTYPE:
        return None
    return _built_in(BY_DTYPE[unit.dtype]).budget(unit.op, unit.op_class)


def exceeded(contract: Contract, unit: RefereedUnit) -> list[str]:
    """The statistics of an operator that exceed its budget; none where it has no budget."""
    bounds = bounds_of(contract, unit)
    if bounds is None or unit.errors is None:
        return []
    # `not <=`: a NaN is over any budget.
    return [n for n in STATISTICS if not abs(getattr(unit.errors, n)) <= bounds[n]]


def bounds_of(contract: Contract, unit: RefereedUnit) -> dict[str, float] | None:
    """What each statistic of an operator may reach: its budget, and where the contract says so the
    rms and the gain of a row for the width of its rows. None where it has no budget."""
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
