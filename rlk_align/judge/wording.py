"""How an operator is off, in words: from its statistics, and what its budget allows of each."""

from rlk_align.judge.contract import Contract
from rlk_align.results import RefereedUnit


def how_off(unit: RefereedUnit, contract: Contract) -> str:
    """E.g. `scaled by 1.020 over all features`; empty for an operator within its budget."""
    errors, budget = unit.errors, contract.budget(unit.op)
    if errors is None or budget is None:
        return ""
    said = []

    def over(name: str) -> bool:
        # `not <=`: a NaN is over any budget.
        return not abs(getattr(errors, name)) <= getattr(budget, name)

    def scale(gain: float) -> str:
        return f"scaled by {1 + gain * errors.unit:.4g}"

    if unit.explanation:
        said.append(unit.explanation)
    elif over("gain"):
        said.append(f"{scale(errors.gain)} over all features")
    elif over("head_gain"):
        said.append(f"head {errors.head} {scale(errors.head_gain)}")
    elif over("row_gain"):
        spread = errors.row_gain * errors.unit
        said.append(f"rows scaled by ±{spread:.2%}: statistics in low precision")
    elif over("feature_gain"):
        said.append(f"feature {errors.feature} {scale(errors.feature_gain)}")
    elif over("feature_shift"):
        said.append(f"feature {errors.feature} shifted")
    elif over("feature_rms") and not over("rms"):
        said.append(f"feature {errors.feature} is off")
    elif over("row_rms") and not over("rms"):
        sample, position = errors.row
        said.append(f"single rows are off, most at sample {sample}, position {position}")
    if over("rms"):
        said.append(f"errors of {errors.rms:.3g} roundings ({budget.rms:g} allowed)")
    elif over("peak") and not said:
        said.append(f"single entries are off by up to {errors.peak:.3g} roundings")
    return "; ".join(said)
