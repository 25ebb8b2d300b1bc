"""Moments of values, which add up over batches. This module does without numpy, because the command
line imports it at its start."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Moments:
    """The number of values, their mean, and the sum of their squared deviations from the mean."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: "NDArray[np.float64]") -> "Moments":
        """Returns the moments of values."""
        if not len(values):
            return cls()
        return cls(len(values), float(values.mean()), float(values.var()) * len(values))

    def __add__(self, other: "Moments") -> "Moments":
        """Returns the moments of both sets of values together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if not count:
            return self
        difference = other.mean - self.mean
        mean = self.mean + difference * other.count / count
        between = difference**2 * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)
