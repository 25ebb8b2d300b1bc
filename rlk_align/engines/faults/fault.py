"""A planted fault, as it is known without an engine."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["computation", "weights", "positions", "boundaries"]
Expected = Literal["named", "rounding", "precheck"]

ALL = ("hf", "vllm", "megatron")


@dataclass(frozen=True, slots=True)
class Strength:
    """How large a fault is."""

    unit: str
    default: float
    curve: tuple[float, ...]
    """From the smallest, for the curve of what is seen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one place of the model."""

    op_class: str
    """norm, rope, attention, cache, projection, activation, residual, embedding, logits, logprob,
    weights or input."""
    sites: tuple[str, ...]
    """Canonical operators that compute it, in execution order: the first is the one to be named."""
    what: str
    """What is wrong, in a sentence."""
    formula: str
    """`module:function` below `formulas`."""
    strength: Strength | None = None
    engines: tuple[str, ...] = ALL
    """Specs on which it can be planted, with the options that it needs."""
    both: str = ""
    """Options that both sides need for it to matter, e.g. `dtype=float32`."""
    kind: Kind = "computation"
    expected: Expected = "named"
    """`rounding`: legitimate in itself, so that a bitwise comparison sees it, and no budget has to;
    `precheck`: told by the precheck, before any number."""
    mismatch: str = ""
    """The name of the precheck's mismatch."""
    decode: bool = False
    """Whether only rows of decode steps have it."""
    needs_bias: bool = False

    @property
    def site(self) -> str:
        """Where it has to be named."""
        return self.sites[0]
