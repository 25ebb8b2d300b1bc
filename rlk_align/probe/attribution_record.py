"""The records of an attribution: what each introducer contributes to the log-probs."""

from typing import Self

from pydantic import model_validator

from rlk_align.results import Cell, EdgeName, Result, Size


class Contribution(Result):
    """The contribution of a unit, or of all units of a layer, to Δ = logp of B - logp of A of each
    token, in nats. The difference that is added or removed is the one that they introduced,
    A(xA) - B(xA)."""

    name: str
    """A unit's name, a layer such as `layers.3`, or `logprob`."""
    units: list[str]
    first: list[float]
    """By how much Δ falls if the difference alone is added to B."""
    last: list[float]
    """By how much Δ rises from 0 if the difference alone is removed from A."""

    @property
    def mean(self) -> tuple[float, float]:
        """The means of `first` and of `last` over the tokens, which are the ends of its range."""
        return _mean(self.first), _mean(self.last)

    @property
    def mean_abs(self) -> float:
        """The mean magnitude over the tokens, of `first` or `last`, whichever is larger."""
        return max(_mean(list(map(abs, order))) for order in (self.first, self.last))


class Attribution(Result):
    """Δ of an edge, token by token, split into contributions. Their sum differs from Δ by their
    interaction."""

    edge: EdgeName
    tokens: list[Cell]
    whole: list[float]
    """Δ of each token."""
    layers: list[Contribution]
    """A unit outside of the layers is an entry of its own."""
    operators: dict[str, list[Contribution]]
    """Layer -> the contributions of its units."""
    left_out: list[str]
    """Undetermined units. What they introduce is part of the interaction."""
    unexplained: Size
    """The largest distance of B's log-probs from A's if all introduced differences are added to B
    at once: 0 if they explain all of Δ."""

    @property
    def largest(self) -> Contribution | None:
        """The unit with the largest mean magnitude among those that were measured one by one."""
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
