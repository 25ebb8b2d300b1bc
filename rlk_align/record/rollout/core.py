"""What the recorder of a server asks of a live rollout engine, and what it is shown of requests."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlk_align.engines.base import Engine
from rlk_align.record.shared.shard import Shard
from rlk_align.trace.writer import PassWriter

T = TypeVar("T")
OWN = "rlk-record-"
"""The beginning of the ids of the requests with which the recorder scores sequences."""


class LiveRequest(Protocol):
    """A request of the engine."""

    @property
    def name(self) -> str:
        """Its id in the engine."""

    @property
    def given_name(self) -> str:
        """The id that its client gave it."""

    @property
    def refusal(self) -> str:
        """Why it is not recorded; empty if it can be. The other properties are read of a request
        that can be."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The token ids of its prompt."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Those of the prompt and of the response so far."""

    @property
    def adapter(self) -> int:
        """The engine's number of its LoRA adapter; 0 for none."""

    @property
    def preemptions(self) -> int:
        """How often the scheduler took its cache away."""


@dataclass(frozen=True, slots=True)
class Output:
    """What an engine says of a request after a forward."""

    name: str
    """The request."""
    logprobs: Sequence[float] = ()
    """Those of the tokens that it sampled since the output before."""
    scores: Sequence[float] = ()
    """The log-probs of further tokens of its prompt."""
    ended: bool = False
    left_out: str = ""
    """Why a request that has ended cannot be chosen."""


class Core(ABC):
    """A live engine between its forwards."""

    engine: Engine
    """The adapter that describes it."""
    log: logging.Logger
    context: int
    """The longest sequence that it takes, in tokens."""

    @abstractmethod
    def next_step(self) -> int:
        """The number after the last step that was begun in the folder of the recordings."""

    @abstractmethod
    def begin_shard(self, step: int) -> Shard:
        """As `SideFolder.begin`."""

    def together(self, act: Callable[[], T]) -> T:
        """The result of `act`. In an engine whose ranks all have the recorder, each rank calls it,
        and an error of one rank is raised on all."""
        return act()

    @abstractmethod
    def describe(self, shard: Shard, first: LiveRequest) -> None:
        """Describes the engine as the first request of a step meets it."""

    @abstractmethod
    def begin_pass(self, writer: PassWriter, kind: str) -> None:
        """Opens a pass, which ends before the next one begins. `kind`: `decode` or `prefill`."""

    @abstractmethod
    def end_pass(self) -> None:
        """Closes the open pass, if there is one. Raises RlkError if its rows were not written."""

    @abstractmethod
    def tap(self, request: str, sample: int, wanted: range) -> None:
        """Taps a request before its first forward. `wanted`: the positions whose logits are."""

    @abstractmethod
    def untap(self, request: str) -> None:
        """Ends the taps of a request."""

    @abstractmethod
    def score(self, name: str, scored: LiveRequest) -> None:
        """Gives the scheduler a request that scores the sequence of another one, and finds none of
        it in the cache."""

    @abstractmethod
    def abort(self, requests: Sequence[str]) -> None:
        """Ends requests."""

    def weight_version(self) -> str:
        """The version of the weights by the engine's own count; empty where it does not count."""
        return ""
