"""The result of drawing a request's tokens again."""

from dataclasses import dataclass
from typing import Literal

from rlk_align.judge.verdict import EXIT_CODES, Status
from rlk_align.results import EngineRecord

Reason = Literal["another logit", "another kept set", "another draw", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitDifference:
    """Between the recorded logits of a token and those of the engine, in float64."""

    differing: int
    """The number of logits with another value."""
    of: int
    largest: float
    token: int
    """The token of the largest difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The first token that is drawn otherwise, after the recorded tokens before it."""

    number: int
    """Among the request's drawn tokens, from 0."""
    position: int
    """The token's index in the request."""
    recorded: int
    drawn: int
    gap: float
    """The engine's logit of the drawn token minus that of the recorded one."""
    kept: int
    """The number of tokens that the limits keep here."""
    mass: float
    """Their share of the softmax at the temperature."""
    recorded_is_kept: bool
    recorded_logprob: float | None
    """None if it was not recorded."""
    logprob: float
    """That of the recorded token, by the engine's logits, as the record defines it."""
    logits: LogitDifference | None
    """None if the record has no logits of the token, or the same ones."""
    same_logits: bool | None
    """None if the record has no logits of the token."""
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A request whose tokens were drawn again."""

    request: str
    engine: EngineRecord
    settings: dict[str, float]
    """The temperature and the limits of the record."""
    seeds: tuple[int, ...]
    """In the order of their first tokens."""
    tokens: int
    """The number of tokens that were drawn again."""
    missing: int
    """Tokens of which the engine recorded no logits."""
    otherwise: int
    """Tokens that are drawn otherwise, each after the recorded tokens before it."""
    other_logprobs: int
    """Tokens whose recorded log-prob has another value."""
    compared_logprobs: int
    first_other_logprob: int | None
    """The index in the request of the first of them."""
    parting: Parting | None

    @property
    def status(self) -> Status:
        if self.parting is not None:
            return "fail"
        return "pass" if self.tokens and not self.missing else "inconclusive"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]
