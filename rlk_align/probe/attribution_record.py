"""The records of an attribution: what each introducer contributes to the log-probs."""

import math
from typing import Self

from pydantic import model_validator

from rlk_align.results import Cell, EdgeName, Result, Size


class Contribution(Result):
    """What a unit, or all units of a layer, contribute to Δ = logp of B - logp of A, in nats, by
    token. The difference that is put in is the one that they introduced, A(xA) - B(xA)."""

    name: str
    """A unit's name, `layers.3` for a layer, or `logprob`."""
    units: list[str]
    first: list[float]
    """It alone put into B: by how much Δ falls."""
    last: list[float]
    """It alone taken out of A: by how much Δ rises from 0."""

    @property
    def mean(self) -> tuple[float, float]:
        """Over the tokens, first and last: the ends of its range."""
        return _mean(self.first), _mean(self.last)

    @property
    def mean_abs(self) -> float:
        """Mean magnitude over the tokens, the larger of the two."""
        return max(_mean(list(map(abs, order))) for order in (self.first, self.last))


class Attribution(Result):
    """Δ of an edge, token by token, as single contributions and their interaction."""

    edge: EdgeName
    tokens: list[Cell]
    whole: list[float]
    """Δ of each token."""
    layers: list[Contribution]
    """Add up to the whole with their interaction. What is in no layer stands for itself."""
    operators: dict[str, list[Contribution]]
    """Layer -> its units; add up to the layer's with their interaction."""
    left_out: list[str]
    """Undetermined units: what they introduce is part of the interaction."""
    unexplained: Size
    """With all contributions put into B at once: the largest distance of its log-probs from A's; 0
    where the introduced differences explain all of Δ."""

    def interaction(self, layer: str | None = None) -> tuple[list[float], list[float]]:
        """The whole, or a layer's contribution, less the sum of its parts: by token, first and
        last."""
        if layer is None:
            return _rest(self.whole, [c.first for c in self.layers]), _rest(
                self.whole, [c.last for c in self.layers]
            )
        above = next(c for c in self.layers if c.name == layer)
        parts = self.operators[layer]
        return _rest(above.first, [c.first for c in parts]), _rest(
            above.last, [c.last for c in parts]
        )

    @property
    def largest(self) -> Contribution | None:
        """The unit with the largest mean magnitude, among those that were looked at one by one."""
        alone = [c for c in self.layers if len(c.units) == 1]
        units = [*alone, *(c for parts in self.operators.values() for c in parts)]
        return max(units, key=lambda c: c.mean_abs, default=None)

    @model_validator(mode="after")
    def _one_number_a_token(self) -> Self:
        parts = [*self.layers, *(c for parts in self.operators.values() for c in parts)]
        lengths = {len(self.whole), *(len(o) for c in parts for o in (c.first, c.last))}
        if lengths != {len(self.tokens)}:
            raise ValueError("a contribution has a different number of tokens than the edge")
        return self


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _rest(whole: list[float], parts: list[list[float]]) -> list[float]:
    """What the parts lack of the whole, token by token."""
    return [w - math.fsum(p[i] for p in parts) for i, w in enumerate(whole)]
