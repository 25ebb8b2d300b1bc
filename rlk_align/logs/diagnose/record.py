"""The records of diagnoses."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Name = Literal[
    "vacuous",
    "misaligned",
    "mask-shifted",
    "above-zero",
    "missing",
    "low-precision",
    "duplicated",
    "wrong-token",
    "logprob-scaled",
    "temperature",
    "truncation",
    "turn-boundary",
    "packing",
    "rope",
    "stale-cache",
    "stale-weights",
    "decode-state",
    "routing",
    "dropout",
    "quantisation",
    "single-token",
    "numerics",
]
Confidence = Literal["high", "moderate", "low"]
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class Token(BaseModel):
    """A token that shows a mismatch."""

    model_config = _FROZEN

    id: str
    """The sequence's id."""
    position: int
    """The token's position in the sequence, from 0."""
    token: int
    rollout: float | None
    """The rollout's log-prob; null if none was recorded."""
    train: float | None


class Untested(BaseModel):
    """A kind of mismatch that the run can neither confirm nor exclude."""

    model_config = _FROZEN

    name: Name
    why: str
    suspected: bool = False
    """Whether the mismatch is more probable than not, so that the run cannot pass."""


class Diagnosis(BaseModel):
    """A kind of mismatch that the log-probs show."""

    model_config = _FROZEN

    name: Name
    statistic: str
    """The meaning of `value`."""
    value: float
    low: float
    """The true value very probably lies between `low` and `high`, an interval of four standard
    deviations that is clustered by sequence."""
    high: float
    limit: float
    """The contract's limit, which is below the whole interval."""
    confidence: Confidence
    why: str
    """The observation, in a sentence for a reader who sees the name for the first time."""
    samples: list[Token]
    """The tokens that show it most, the clearest first."""
    next: str
    """The next command, or the change to make."""
