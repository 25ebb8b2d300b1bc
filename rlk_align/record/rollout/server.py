"""Records a vLLM server from within its engine core, between forwards, while it goes on serving.

Chosen requests are tapped as they are sampled, among all other requests. Once the last request of a
step has ended, the engine core scores the chosen sequences again, as requests of its own among all
others: with taps, without, and with taps again. An error ends the recording of a step, and never
the server.
"""

import functools
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlk_align.errors import EngineFailed, RlkError, TraceNotWritten
from rlk_align.record.rollout.engine import live_engine
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.step import OWN, Step
from rlk_align.record.shared.layout import next_step
from rlk_align.record.shared.shard import SideFolder

ABORTED = "its client ended it"
_BUSY = "the step before was still being recorded: a larger RLK_RECORD_EVERY leaves more time"
_IDLE_STEPS = 1000
"""After how many forwards without a token the engine computes nothing more."""
_OF_VLLM = re.compile(r"(?:\d+_)?(?:cmpl-|chatcmpl-|generate-tokens-)?")
"""What vLLM puts before the id that a client gives a request."""
log = logging.getLogger("vllm.rlk_align")


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Makes an error end the recording of the step, and not the server."""

    @functools.wraps(method)
    def run(self: "ServerRecorder", *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.lose(error)

    return run


class _EngineCoreLLM:
    """What the adapter of vLLM asks of an LLM; the engine core has the workers."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.llm_engine = core.vllm_config

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._core.model_executor.collective_rpc(method, args=args)


class ServerRecorder:
    """Records some requests of some steps of a server. One step is recorded at a time."""

    def __init__(self, core: Any, settings: Settings) -> None:
        """Raises BadOption for a model that is not recorded yet, ToolError if another process
        records into the folder."""
        self._core, self._settings = core, settings
        self._engine = live_engine(_EngineCoreLLM(core), core.vllm_config)
        self._folder = SideFolder(settings.folder, "rollout", settings.budget)
        # A server that starts again goes on with the next number.
        self._first = -(-next_step(self._folder.path) // settings.every) * settings.every
        self._counted, self._begun, self._recording = 0, -1, -1
        self._step: Step | None = None
        self._unasked: set[str] = set()
        """The running requests of which the recorder has log-probs, and their clients do not."""
        self._watch_schedule(core.scheduler)

    @guarded
    def offer(self, request: Any) -> None:
        """Takes a request before the scheduler does."""
        name = request.request_id
        if name.startswith(OWN) or not self._asked_for(name):
            return
        number, place = divmod(self._counted, self._settings.window)
        self._counted += 1
        if number % self._settings.every:
            return
        if number > self._begun:
            self._begin(number)
        # A step that was given up, or could not begin, has none.
        if self._step is not None and number == self._recording:
            if self._step.offer(request) and request.sampling_params.logprobs is None:
                request.sampling_params.logprobs = 0
                self._unasked.add(name)
            self._step.window.full = place + 1 == self._settings.window

    def take(self, outputs: dict[int, Any]) -> None:
        """Takes the outputs of a forward, and removes log-probs that no client asked for."""
        every = [output for of_client in outputs.values() for output in of_client.outputs]
        self._show(every)
        for output in every:
            if output.request_id in self._unasked:
                output.new_logprobs = None
                if output.finish_reason is not None:
                    self._unasked.remove(output.request_id)

    @guarded
    def _show(self, outputs: list[Any]) -> None:
        if self._step is not None:
            for output in outputs:
                self._step.take(output)
            self._advance()

    @guarded
    def aborted(self, requests: list[str]) -> None:
        """Takes the ids of requests that end without a last output."""
        self._unasked.difference_update(requests)
        if self._step is None:
            return
        for name in requests:
            if tracked := self._step.window.tracked.get(name):
                self._step.end(tracked, ABORTED)
        self._advance()

    @guarded
    def end_step(self, reason: str) -> None:
        """Completes the step that is being recorded, before something after which its sequences
        cannot be scored. `reason`: why requests that have not ended are left out."""
        if self._step is None:
            return
        for tracked in self._step.window.tracked.values():
            self._step.end(tracked, reason)
        self._step.window.full = True
        self._advance()
        idle = 0
        while self._step is not None:
            idle = 0 if self._core._process_engine_step() else idle + 1
            if idle > _IDLE_STEPS:
                raise EngineFailed("the engine computes nothing more, and so no scores")

    def lose(self, error: Exception) -> None:
        """Gives the step up."""
        step, self._step = self._step, None
        number = self._first + (self._begun if step is None else self._recording)
        # An error of ours needs its traceback; what users can correct says itself what to do.
        trace = None if isinstance(error, RlkError | OSError) else error
        log.warning("rlk-align does not record step %d: %s", number, error, exc_info=trace)
        if step is not None:
            step.abandon(str(error) or type(error).__name__)

    def _begin(self, number: int) -> None:
        self._begun, name = number, self._first + number
        if self._step is not None:
            log.warning("rlk-align does not record step %d: %s", name, _BUSY)
            with suppress(TraceNotWritten):
                self._folder.begin(name).abandon(_BUSY)
            return
        self._recording = number
        shard = self._folder.begin(name)
        self._step = Step(self._core, self._engine, shard, self._settings.sequences)

    def _advance(self) -> None:
        if self._step is not None and self._step.advance():
            log.info("rlk-align has recorded step %d", self._first + self._recording)
            self._step = None

    def _asked_for(self, name: str) -> bool:
        prefix = self._settings.requests
        return name.startswith(prefix) or _OF_VLLM.sub("", name, count=1).startswith(prefix)

    def _watch_schedule(self, scheduler: Any) -> None:
        """Shows each plan of the scheduler to the step that is being recorded."""
        original = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            plan = original(*args, **kwargs)
            if self._step is not None:
                self._step.window.scheduled(plan.num_scheduled_tokens)
            return plan

        scheduler.schedule = schedule


def start(core: Any) -> ServerRecorder | None:
    """The recorder of an engine core; None, with a warning, if there can be none."""
    settings = Settings.read()
    assert settings is not None
    try:
        return ServerRecorder(core, settings)
    except RlkError as error:
        log.warning("rlk-align records nothing: %s; %s", error.message, error.fix)
        return None
