"""Shows the recorder what SGLang's scheduler does, in the process of each of its ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlk_align.engines.common.hooks import Hooks
from rlk_align.record.rollout.core import OWN
from rlk_align.record.rollout.server import ServerRecorder, start
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.sglang.core import SGLangCore, log
from rlk_align.record.rollout.sglang.request import SGLangRequest

_UPDATED = "the weights were updated"
_ENDS = {
    **dict.fromkeys(
        (
            *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromDistributedReqInput"),
            *("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromIPCReqInput"),
            "BeginWeightUpdateReqInput",
        ),
        _UPDATED,
    ),
    "PauseGenerationReqInput": "the engine paused",
    "ReleaseMemoryOccupationReqInput": "the engine released its memory",
    "FlushCacheReqInput": "a client flushed the cache",
    "RpcReqInput": "a client called the scheduler, which may have changed the weights",
}
"""The input of a scheduler that ends the step -> why requests that it interrupts are left out."""


class SGLangServer:
    """The recorder of a scheduler."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        """Raises as `SGLangCore`."""
        from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

        self._raw = bool(SGLANG_RETURN_ORIGINAL_LOGPROB)
        self._recorder = ServerRecorder(SGLangCore(scheduler, settings), settings)
        self._live: dict[str, SGLangRequest] = {}
        """The running requests that are recorded, or that score."""
        self._unasked: set[str] = set()
        """Those of which the recorder has log-probs, and their clients do not."""
        self._held: list[Any] = []
        """What the scheduler gets after the step has been scored."""
        self._watch(scheduler)

    def _watch(self, scheduler: Any) -> None:
        hooks, streamer = Hooks(), type(scheduler.output_streamer)
        make, take = scheduler._create_generation_req, scheduler.process_input_requests
        run, process = scheduler.run_batch, scheduler.process_batch_result
        send_abort, stream = scheduler.send_abort_output, streamer.stream_output

        def create(received: Any, *args: Any, **settings: Any) -> Any:
            request = self._offered(received, settings)
            made = make(received, *args, **settings)
            if request is not None:
                request.live = made
            return made

        def inputs(received: list[Any]) -> None:
            self._take_inputs(take, received)

        def run_batch(batch: Any, *args: Any, **settings: Any) -> Any:
            self._planned(batch)
            return run(batch, *args, **settings)

        def processed(batch: Any, result: Any) -> None:
            process(batch, result)
            self._take_ended(batch.reqs)

        def aborted(message: Any, request: Any) -> None:
            own = request.rid.startswith(OWN)
            if not own:
                send_abort(message, request)
            self._forget(request.rid)
            self._recorder.aborted([request.rid])

        def stream_output(of: Any, requests: Sequence[Any], *args: Any, **settings: Any) -> None:
            with self._as_asked(requests) as shown:
                stream(of, shown, *args, **settings)

        hooks.replace(scheduler, "_create_generation_req", create)
        hooks.replace(scheduler, "process_input_requests", inputs)
        hooks.replace(scheduler, "run_batch", run_batch)
        hooks.replace(scheduler, "process_batch_result", processed)
        hooks.replace(scheduler, "send_abort_output", aborted)
        # Its objects take no attributes.
        hooks.replace(streamer, "stream_output", stream_output)

    def _offered(self, received: Any, settings: dict[str, Any]) -> SGLangRequest | None:
        """A request that is recorded, or that scores; None for another one. `settings`: those with
        which SGLang makes its object of it."""
        request = SGLangRequest(received, self._raw)
        if not request.name.startswith(OWN):
            if _is_health_check(received) or not self._recorder.offer(request):
                return None
            if not received.return_logprob:
                received.return_logprob = settings["return_logprob"] = True
                self._unasked.add(request.name)
        self._live[request.name] = request
        return request

    def _take_inputs(self, take: Any, received: list[Any]) -> None:
        """Gives the scheduler its inputs in their order. What ends a step, and all after it, waits
        until the step has been scored."""
        waiting = [*self._held, *received]
        self._held, now = [], list[Any]()
        for i, each in enumerate(waiting):
            if reason := _ENDS.get(type(each).__name__):
                take(now)
                now = []
                self._recorder.end_step(reason)
                if self._recorder.recording:
                    self._held = waiting[i:]
                    return
            now.append(each)
        take(now)

    def _planned(self, batch: Any) -> None:
        """Shows the rows of the next forward to the recorder."""
        if not self._recorder.recording:
            return
        for i, request in enumerate(batch.reqs):
            if batch.forward_mode.is_decode():
                self._recorder.scheduled(request.rid, int(batch.seq_lens_cpu[i]) - 1, 1)
            elif batch.forward_mode.is_extend():
                self._recorder.scheduled(request.rid, batch.prefix_lens[i], batch.extend_lens[i])

    def _take_ended(self, requests: Sequence[Any]) -> None:
        ended = [r.rid for r in requests if r.rid in self._live and r.finished()]
        outputs = [self._live[name].ended() for name in ended]
        for name in ended:
            self._forget(name)
        if ended:
            self._recorder.take(outputs)

    def _forget(self, name: str) -> None:
        self._live.pop(name, None)
        self._unasked.discard(name)

    @contextmanager
    def _as_asked(self, requests: Sequence[Any]) -> Iterator[list[Any]]:
        """The requests that have clients, without log-probs that no client asked for."""
        unasked = [r for r in requests if r.rid in self._unasked]
        for request in unasked:
            request.return_logprob = False
        try:
            yield [r for r in requests if not r.rid.startswith(OWN)]
        finally:
            for request in unasked:
                request.return_logprob = True


def _is_health_check(received: Any) -> bool:
    from sglang.srt.managers.utils import is_health_check_generate_req

    return bool(is_health_check_generate_req(received))


def start_server(scheduler: Any) -> SGLangServer | None:
    """The recorder of a scheduler; None, with a warning, if there can be none."""
    return start(lambda settings: SGLangServer(scheduler, settings), log)
