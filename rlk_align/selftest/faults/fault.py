"""A planted fault, as it is known without an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlk_align.model.sites import Site

Kind = Literal["computation", "weights", "positions", "boundaries", "sparse"]
"""`sparse`: planted by what the engine's `SparseLayers` can change."""
Expected = Literal["named", "rounding", "precheck"]

ALL = ("hf", "vllm", "megatron")


@dataclass(frozen=True, slots=True)
class Strength:
    """How large a fault is."""

    unit: str
    default: float
    curve: tuple[float, ...]
    """Strengths from the smallest on, for the curve of what is seen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one place of the model."""

    op_class: str
    """norm, rope, attention, cache, projection, activation, residual, embedding, logits, logprob,
    weights, input, or routing: of a sparse layer."""
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
    idle: str = ""
    """An option with which it changes nothing, e.g. `dtype=float32`."""
    kind: Kind = "computation"
    expected: Expected = "named"
    """`rounding`: legitimate in itself, so that a bitwise comparison sees it, and no budget has to;
    `precheck`: told by the precheck, before any number."""
    mismatch: str = ""
    """The name of the precheck's mismatch."""
    decode: bool = False
    """Whether only rows of decode steps have it."""
    needs: Literal["", "bias", "ties", "shared"] = ""
    """What the model has to have for it: biases, experts whose logits tie, or experts that every
    token is sent to."""

    @property
    def site(self) -> str:
        """Where it has to be named."""
        return self.sites[0]

    @property
    def sparse(self) -> bool:
        """Whether it is of a sparse layer."""
        return self.op_class == "routing"

    def fits(self, sites: Mapping[str, "Site"]) -> bool:
        """Whether a model of these sites has a place for it: an operator within the experts has
        rows of tokens by expert, which other faults know nothing of."""
        if self.needs == "bias" and any(s.sparse for s in sites.values()):
            return False
        return all(n in sites and self.sparse == sites[n].sparse for n in self.sites)
