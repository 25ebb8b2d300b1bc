"""Which budget a side's operator is held to: one of its own dtype."""

from functools import cache

from rlk_align.judge.contract import Budget, Contract
from rlk_align.judge.load import BY_DTYPE, open_contract
from rlk_align.results import RefereedUnit


def budget_of(contract: Contract, unit: RefereedUnit) -> Budget | None:
    """The contract's budget for an operator. A side that computes in a dtype of which the contract
    does not speak is held to the built-in contract of that dtype. None where the contract has no
    budgets, or where no contract has one for that dtype."""
    if not contract.budgets or unit.dtype in ("", *contract.dtypes):
        return contract.budget(unit.op)
    return _built_in(BY_DTYPE[unit.dtype]).budget(unit.op) if unit.dtype in BY_DTYPE else None


@cache
def _built_in(name: str) -> Contract:
    return open_contract(name)
