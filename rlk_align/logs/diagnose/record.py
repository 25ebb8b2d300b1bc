"""What a diagnosis is."""

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
    """The token's place in the sequence, from 0."""
    token: int
    rollout: float | None
    """The rollout's log-prob; null where none was recorded."""
    train: float | None


class Untested(BaseModel):
    """A kind of mismatch that the run says too little of to be found or ruled out."""

    model_config = _FROZEN

    name: Name
    why: str
    suspected: bool = False
    """Whether the mismatch is more probable than not: too much to pass."""


class Diagnosis(BaseModel):
    """A kind of mismatch that the log-probs show."""

    model_config = _FROZEN

    name: Name
    statistic: str
    """What `value` is, in words."""
    value: float
    low: float
    """Between `low` and `high` lies the true value, very probably: the interval is clustered by
    sequence, at four standard deviations."""
    high: float
    limit: float
    """The contract's limit, which the whole interval is above."""
    confidence: Confidence
    why: str
    """What was seen, in a sentence for somebody who sees the name for the first time."""
    samples: list[Token]
    """The tokens that show it most, the clearest first."""
    next: str
    """The next command, or what to change."""
