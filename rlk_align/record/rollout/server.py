"""Records a server from within its engine, between forwards, while it goes on serving.

Chosen requests are tapped as they are sampled, among all other requests. Once the last request of a
step has ended, the engine scores the chosen sequences again, as requests of its own among all
others: with taps, without, and with taps again. An error ends the recording of a step, and never
the server.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from rlk_align.errors import RlkError, TraceNotWritten
from rlk_align.record.rollout.core import OWN, Core, LiveRequest, Output
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.step import Step

ABORTED = "its client ended it"
_BUSY = "the step before was still being recorded: a larger RLK_RECORD_EVERY leaves more time"
R = TypeVar("R")


def guarded(method: Callable[..., R]) -> Callable[..., R | None]:
    """Makes an error end the recording of the step, and not the server; None then."""

    @functools.wraps(method)
    def run(self: "ServerRecorder", *args: Any) -> R | None:
        try:
            return method(self, *args)
        except Exception as error:
            self.lose(error)
            return None

    return run


class ServerRecorder:
    """Records some requests of some steps of a server. One step is recorded at a time."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self._core, self._settings = core, settings
        # A server that starts again goes on with the next number.
        self._first = -(-core.next_step() // settings.every) * settings.every
        self._counted, self._begun, self._recording = 0, -1, -1
        self._step: Step | None = None

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded."""
        return self._step is not None

    @guarded
    def offer(self, request: LiveRequest) -> bool:
        """Takes a request before the scheduler does; returns whether it is recorded."""
        prefix = self._settings.requests
        if request.name.startswith(OWN) or not (
            request.name.startswith(prefix) or request.given_name.startswith(prefix)
        ):
            return False
        number, place = divmod(self._counted, self._settings.window)
        self._counted += 1
        if number % self._settings.every:
            return False
        if number > self._begun:
            self._begin(number)
        # A step that was given up, or could not begin, has none.
        if self._step is None or number != self._recording:
            return False
        recorded = self._step.offer(request)
        self._step.window.full = place + 1 == self._settings.window
        return recorded

    @guarded
    def take(self, outputs: Iterable[Output]) -> None:
        """Takes the outputs of a forward."""
        if self._step is not None:
            for output in outputs:
                self._step.take(output)
            self._advance()

    def scheduled(self, request: str, start: int, tokens: int) -> None:
        """Takes the rows of a request in the next forward, from position `start` on."""
        if self._step is not None and (tracked := self._step.window.tracked.get(request)):
            tracked.scheduled(start, tokens)

    @guarded
    def aborted(self, requests: Iterable[str]) -> None:
        """Takes the ids of requests that end without a last output."""
        if self._step is None:
            return
        for name in requests:
            if tracked := self._step.window.tracked.get(name):
                self._step.end(tracked, ABORTED)
        self._advance()

    @guarded
    def end_step(self, reason: str) -> None:
        """Ends the step that is being recorded, before something after which its sequences cannot
        be scored; the engine scores them first, while `recording`. `reason`: why requests that have
        not ended are left out."""
        # What comes afterwards is another step.
        self._counted = -(-self._counted // self._settings.window) * self._settings.window
        if self._step is None:
            return
        for tracked in self._step.window.tracked.values():
            self._step.end(tracked, reason)
        self._step.window.full = True
        self._advance()

    def lose(self, error: Exception) -> None:
        """Gives the step up."""
        step, self._step = self._step, None
        number = self._first + (self._begun if step is None else self._recording)
        # An error of ours needs its traceback; what users can correct says itself what to do.
        trace = None if isinstance(error, RlkError | OSError) else error
        self._core.log.warning(
            "rlk-align does not record step %d: %s", number, error, exc_info=trace
        )
        if step is not None:
            step.abandon(str(error) or type(error).__name__)

    def _begin(self, number: int) -> None:
        self._begun, name = number, self._first + number
        if self._step is not None:
            self._core.log.warning("rlk-align does not record step %d: %s", name, _BUSY)
            with suppress(TraceNotWritten):
                self._core.begin_shard(name).abandon(_BUSY)
            return
        self._recording = number
        self._step = Step(self._core, self._core.begin_shard(name), self._settings.sequences)

    def _advance(self) -> None:
        if self._step is not None and self._step.advance():
            number = self._first + self._recording
            self._core.log.info("rlk-align has recorded step %d", number)
            self._step = None


def start(make: Callable[[Settings], R], log: logging.Logger) -> R | None:
    """The recorder of an engine; None, with a warning, if there can be none: the server goes on
    without it."""
    settings = Settings.read()
    assert settings is not None
    try:
        return make(settings)
    except RlkError as error:
        log.warning("rlk-align records nothing: %s; %s", error.message, error.fix)
        return None
