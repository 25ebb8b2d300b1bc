"""The tail of a distribution, by which a limit bounds the maximum of many values."""

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field


class Tail(BaseModel):
    """How the largest of N tokens grows with N in healthy runs: a token exceeds `value` with the
    probability 1 − `quantile`, and the excess is exponential with the mean `scale` (peaks over a
    threshold, Pickands 1975). In the unit of the limit's metric."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    quantile: Annotated[float, Field(gt=0, lt=1)]
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    chance: Annotated[float, Field(gt=0, lt=1)]
    """The probability with which a healthy run, of any number of tokens, exceeds the limit."""

    def bound(self, tokens: int) -> float:
        """Returns the bound on the largest of this many tokens: P(max > x) ≤ N (1 − q) exp(−(x −
        value) / scale) = chance, whether tokens are independent or not."""
        return self.value + self.scale * max(
            0.0, math.log(max(1, tokens) * (1 - self.quantile) / self.chance)
        )


class TailLimit:
    """A limit whose bound may depend on the number of tokens."""

    if TYPE_CHECKING:
        fail: float
        tail: Tail | None

    def fail_at(self, tokens: int) -> float:
        """The bound for this many tokens: `fail`, or what their largest value may reach, whichever
        is less."""
        return self.fail if self.tail is None else min(self.fail, self.tail.bound(tokens))
