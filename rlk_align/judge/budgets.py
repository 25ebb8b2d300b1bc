"""Which budget a side's operator is held to: one of its own dtype."""

from functools import cache

from rlk_align.judge.contract import Budget, Contract
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


@cache
def _built_in(name: str) -> Contract:
    return open_contract(name)
