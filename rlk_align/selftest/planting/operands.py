"""The operands of a formula: an operator's inputs, its own result, and its parameters.

N = rows, F = features, H = heads, D = features of a head.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class ForwardTokens:
    """The rows of a forward; tensors `[N]`, padding included."""

    ids: torch.Tensor
    positions: torch.Tensor
    decoding: torch.Tensor
    """bool: whether a row is the only one of its sequence in this forward, and not the first one of
    the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One operator in one forward. Its inputs have the order of the canonical site's inputs."""

    result: torch.Tensor
    """The engine's own result, `[N, F]`."""
    inputs: tuple[torch.Tensor, ...] = ()
    """`[N, F]` each."""
    head_dim: int
    rows: ForwardTokens | None = None
    """The rows of the forward; None if the operator computes only some of them."""
    weight: torch.Tensor | None = None
    """The weight of a norm `[D]` or `[F]`, or of a projection `[F, F_in]`."""
    bias: torch.Tensor | None = None
    eps: float = 0.0
    multiplier: float = 1.0
    """The number of the config that multiplies the output or, of a residual add, the branch."""
    input_multiplier: float = 1.0
    """The number of the config that multiplies the first input before."""
    frequencies: torch.Tensor | None = None
    """The frequencies of a rotary embedding: radians for each position, by pair, float64."""
    interleaved: bool = False
    """Whether the rotary embedding turns features 2j and 2j + 1 together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attention core over one sequence."""

    result: torch.Tensor
    """`[T, H * D]`."""
    query: torch.Tensor
    """`[T, H, D]`."""
    key: torch.Tensor
    """`[S, KV, D]`, the keys of the sequence's tokens up to the last one of `query`."""
    value: torch.Tensor
    visible: torch.Tensor
    """bool `[T, S]`: which keys a query attends to."""
    scale: float
    head_dim: int
    sinks: torch.Tensor | None = None
    """The score of each head for a key without a value, `[H]`."""
    latent: int = 0
    """The width of the latent and of the rotated key beside it, from which keys and values were
    expanded; 0 in other attentions."""

    @property
    def decoding(self) -> bool:
        """Whether this is a decode step."""
        return len(self.query) == 1 and len(self.key) > 1


State: TypeAlias = torch.Tensor
"""The state of a gated delta net, float32 `[H, D, V]`, or of a state-space model, `[H, V, D]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """The gated delta rule, or a state-space scan, over tokens of one sequence, T of them."""

    length: int
    """T."""
    state: State | None
    """The state before the first token; None where the sequence begins."""
    decay: torch.Tensor | None
    """The logarithms of the decays, float32 `[T, H]`; None where the engine computes them with the
    rule."""
    compute: Callable[[slice, State | None, torch.Tensor | None], tuple[torch.Tensor, State]]
    """(some of the tokens, the state before them, other decays of these or None) -> the engine's
    output `[T, H, V]`, and the state after them."""

    def usual(self) -> tuple[torch.Tensor, State]:
        """What the engine computes."""
        return self.compute(slice(0, self.length), self.state, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """The convolution before a recurrence, over tokens of one sequence."""

    result: torch.Tensor
    """The engine's own result, `[T, C]`."""
    inputs: torch.Tensor
    """`[T, C]`."""
    weight: torch.Tensor
    """`[C, 1, K]`."""
    bias: torch.Tensor | None = None
    """`[C]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The log-probs of some rows as an engine reports them."""

    result: torch.Tensor
    """The engine's own log-probs, float32 `[N]`."""
    logits: torch.Tensor
    """`[N, V]`."""
    targets: torch.Tensor
    """int64 `[N]`."""
    temperature: float


Formula = Callable[..., torch.Tensor]
"""A Unit, an Attention, a Convolution or a Report -> the value that replaces the result; a
Recurrence -> the output and the state that replace those of the engine; a parameter -> the one that
the engine computes with."""


def formula(compute: Callable[[Any, float], torch.Tensor]) -> Callable[[float], Formula]:
    """Makes `compute(operands, strength)` a function of the strength that returns the formula. It
    is for formulas that are longer than one expression and keep no state."""

    @functools.wraps(compute)
    def of_strength(strength: float) -> Formula:
        return lambda operands: compute(operands, strength)

    return of_strength


def in_place_of(formula: Formula, unit: Unit | Attention | Convolution) -> torch.Tensor:
    """The formula's result, in the shape and the dtype of the engine's."""
    return formula(unit).to(unit.result.dtype).reshape(unit.result.shape)
