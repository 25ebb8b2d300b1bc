"""Shows the recorder what vLLM's engine core does, in the engine core's process."""

from typing import Any

from rlk_align.errors import EngineFailed
from rlk_align.record.rollout.core import Output
from rlk_align.record.rollout.server import ServerRecorder, start
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.vllm.core import VLLMCore, log
from rlk_align.record.rollout.vllm.request import VLLMRequest

_IDLE_STEPS = 1000
"""After how many forwards without a token the engine computes nothing more."""
_ENDED = ("stop", "length", "repetition")
"""The reasons by which a response has ended as its client sees it."""


class VLLMServer:
    """The recorder of an engine core."""

    def __init__(self, core: Any, settings: Settings) -> None:
        """Raises as `VLLMCore`."""
        self._core = core
        self._recorder = ServerRecorder(VLLMCore(core, settings), settings)
        self._unasked: set[str] = set()
        """The running requests of which the recorder has log-probs, and their clients do not."""
        self._watch_schedule(core.scheduler)

    def offer(self, request: Any) -> None:
        """Takes a request before the scheduler does."""
        recorded = self._recorder.offer(VLLMRequest(request))
        if recorded and request.sampling_params.logprobs is None:
            request.sampling_params.logprobs = 0
            self._unasked.add(request.request_id)

    def take(self, outputs: dict[int, Any]) -> None:
        """Takes the outputs of a forward, and removes log-probs that no client asked for."""
        every = [output for of_client in outputs.values() for output in of_client.outputs]
        self._recorder.take(map(_output, every))
        for output in every:
            if output.request_id in self._unasked:
                output.new_logprobs = None
                if output.finish_reason is not None:
                    self._unasked.remove(output.request_id)

    def aborted(self, requests: list[str]) -> None:
        """Takes the ids of requests that end without a last output."""
        self._unasked.difference_update(requests)
        self._recorder.aborted(requests)

    def end_step(self, reason: str) -> None:
        """Completes the step that is being recorded. `reason`: as in `ServerRecorder.end_step`."""
        self._recorder.end_step(reason)
        idle = 0
        while self._recorder.recording:
            idle = 0 if self._core._process_engine_step() else idle + 1
            if idle > _IDLE_STEPS:
                why = "the engine computes nothing more, and so no scores"
                self._recorder.lose(EngineFailed(why))

    def _watch_schedule(self, scheduler: Any) -> None:
        """Shows each plan of the scheduler to the recorder."""
        original = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            plan = original(*args, **kwargs)
            if self._recorder.recording:
                for name, tokens in plan.num_scheduled_tokens.items():
                    start = scheduler.requests[name].num_computed_tokens - tokens
                    self._recorder.scheduled(name, start, tokens)
            return plan

        scheduler.schedule = schedule


def _output(output: Any) -> Output:
    sampled, scored = output.new_logprobs, output.new_prompt_logprobs_tensors
    ended = output.finish_reason is not None
    reason = str(output.finish_reason)
    return Output(
        name=output.request_id,
        logprobs=[] if sampled is None else sampled.logprobs[:, 0].tolist(),
        scores=[] if scored is None else scored.logprobs[:, 0].tolist(),
        ended=ended,
        left_out=f"it ended by {reason}" if ended and reason not in _ENDED else "",
    )


def start_server(core: Any) -> VLLMServer | None:
    """The recorder of an engine core; None, with a warning, if there can be none."""
    return start(lambda settings: VLLMServer(core, settings), log)
