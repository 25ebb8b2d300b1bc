"""What a formula is given of an operator: its inputs, its own result, its parameters.

N = rows, F = features, H = heads, D = features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardTokens:
    """Which rows a forward computes; tensors `[N]`, padding included."""

    ids: torch.Tensor
    positions: torch.Tensor
    decoding: torch.Tensor
    """bool: rows that are their sequence's only one in this forward, and not its first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One operator in one forward; `inputs` in the order of the canonical site's."""

    result: torch.Tensor
    """What the engine itself computes, `[N, F]`."""
    inputs: tuple[torch.Tensor, ...] = ()
    """`[N, F]` each."""
    head_dim: int
    rows: ForwardTokens | None = None
    """The rows of the forward; None where the operator sees only some rows."""
    weight: torch.Tensor | None = None
    """The weight of a norm `[D]` or `[F]`, or of a projection `[F, F_in]`."""
    bias: torch.Tensor | None = None
    eps: float = 0.0
    frequencies: torch.Tensor | None = None
    """The frequencies of a rotary embedding: radians for each position, by pair, float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attention core over one sequence."""

    result: torch.Tensor
    """`[T, H * D]`."""
    query: torch.Tensor
    """`[T, H, D]`."""
    key: torch.Tensor
    """`[S, KV, D]`, of the sequence's tokens up to and including those of `query`."""
    value: torch.Tensor
    visible: torch.Tensor
    """bool `[T, S]`: which keys a query sees."""
    scale: float
    head_dim: int

    @property
    def decoding(self) -> bool:
        """Whether this is a decode step."""
        return len(self.query) == 1 and len(self.key) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Log-probs of some rows, as an engine reports them."""

    result: torch.Tensor
    """What the engine itself reports, float32 `[N]`."""
    logits: torch.Tensor
    """`[N, V]`."""
    targets: torch.Tensor
    """int64 `[N]`."""
    temperature: float


Formula = Callable[..., torch.Tensor]
"""A Unit, an Attention or a Report -> what stands in place of the result."""


def in_place_of(formula: Formula, unit: Unit | Attention) -> torch.Tensor:
    """The formula's result, in the shape and the dtype of the engine's."""
    return formula(unit).to(unit.result.dtype).reshape(unit.result.shape)
