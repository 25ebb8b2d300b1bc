"""One step of a server while it is recorded: its decode pass, and then the passes that score it."""

import time
from typing import Any

import numpy as np

from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.record.rollout.engine import RecordedEngine
from rlk_align.record.rollout.window import Tracked, Window, write_logprobs
from rlk_align.record.shared.layout import ADAPTER
from rlk_align.record.shared.shard import SCORED, Shard
from rlk_align.trace.writer import PassWriter

OWN = "rlk-record-"
"""The beginning of the ids of the requests with which the recorder scores sequences."""
_ENDED = ("stop", "length", "repetition")
"""The reasons by which a response has ended as its client sees it."""


class Step:
    """The recording of one step."""

    def __init__(self, core: Any, engine: RecordedEngine, shard: Shard, sequences: int) -> None:
        self._core, self._engine, self._shard = core, engine, shard
        self._sequences = sequences
        self.window = Window(sequences)
        self._tapping = False
        self._decode: PassWriter | None = None
        self._chosen: list[Tracked] | None = None
        """The sequences that are scored; None while some are still sampled."""
        self._scored: dict[str, Tracked] = {}
        """Request that scores a sequence -> the sequence's own request, in the running pass."""
        self._scores: dict[int, list[np.ndarray]] = {}
        self._writer: PassWriter | None = None
        """That of the running pass that scores."""
        self._passes = list(SCORED)

    def offer(self, request: Any) -> bool:
        """Taps a request of the step if it is to be recorded, and says whether it is."""
        tracked = self.window.offer(request)
        if tracked is None:
            return False
        if self._decode is None:
            self._engine.use_adapter(request.lora_request, self._shard.about / ADAPTER)
            self._shard.describe(self._engine, [tracked.prompt])
            self._decode = self._shard.writer("decode")
            self._begin(self._decode, "decode")
        self._tap(request.request_id, tracked.number, len(tracked.prompt) - 1)
        return True

    def take(self, output: Any) -> None:
        """Takes what vLLM says of a request."""
        if output.request_id in self._scored:
            self._take_scores(output)
        elif (tracked := self.window.tracked.get(output.request_id)) is not None:
            if output.new_logprobs is not None:
                tracked.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                reason = str(output.finish_reason)
                self.end(tracked, "" if reason in _ENDED else f"it ended by {reason}")

    def end(self, tracked: Tracked, left_out: str) -> None:
        """Takes the end of a request. `left_out`: why it cannot be chosen."""
        if not tracked.finished:
            tracked.finished, tracked.left_out = True, left_out
            self._untap(tracked.request.request_id)

    def advance(self) -> bool:
        """Begins the next pass if the running one is complete. Whether the step is complete."""
        if self._chosen is None:
            if not self.window.sampled:
                return False
            self._end_decode()
        if self._scored:
            return False
        if self._writer is not None:
            self._end_scoring(self._writer)
        if self._passes:
            self._begin_scoring(self._passes.pop(0))
            return False
        self._finish()
        return True

    def abandon(self, reason: str) -> None:
        """Gives the step up."""
        if self._scored:
            self._core.abort_requests(list(self._scored))
        if self._tapping:
            self._tapping = False
            self._rpc("rlk_record_end")
        self._shard.abandon(reason)

    def _end_decode(self) -> None:
        self._chosen = self.window.chosen(self._core.vllm_config.model_config.max_model_len)
        if self._decode is None or not self._chosen:
            raise BadOption(f"no request of the step could be recorded: {self.window.reasons()}")
        for each in self.window.tracked.values():
            self._decode.took_from_cache(each.number, each.cached)
            write_logprobs(self._decode, each.number, each.sample, each.logprobs)
        self._end(self._decode, "decode")

    def _begin_scoring(self, name: str) -> None:
        assert self._chosen is not None
        self._writer = self._shard.writer(name)
        tapped = not name.endswith(".untapped")
        if tapped:
            self._begin(self._writer, "prefill")
        for each in self._chosen:
            request = f"{OWN}{self._shard.path.parent.name}-{name}-{each.number}"
            self._scored[request] = each
            if tapped:
                self._tap(request, each.number, len(each.prompt) - 1)
        for request, each in self._scored.items():
            self._enqueue(request, each, salt=f"{OWN}{name}")

    def _enqueue(self, request: str, scored: Tracked, salt: str) -> None:
        """Gives the scheduler a request that scores the sequence of another one. salt: keeps a pass
        from reusing prefixes that another one left in the cache."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        scoring = EngineCoreRequest(
            request_id=request,
            prompt_token_ids=list(scored.ids),
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=scored.request.lora_request,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(scoring))

    def _take_scores(self, output: Any) -> None:
        each = self._scored[output.request_id]
        if output.new_prompt_logprobs_tensors is not None:
            scores = output.new_prompt_logprobs_tensors.logprobs[:, 0].cpu().numpy()
            self._scores.setdefault(each.number, []).append(scores)
        if output.finish_reason is not None:
            del self._scored[output.request_id]
            self._untap(output.request_id)

    def _end_scoring(self, writer: PassWriter) -> None:
        assert self._chosen is not None
        for each in self._chosen:
            scores, sample = np.concatenate(self._scores.pop(each.number)), each.sample
            write_logprobs(writer, each.number, sample, scores[list(sample.sampled_positions)])
        self._end(writer, "prefill")
        self._writer = None

    def _finish(self) -> None:
        assert self._chosen is not None
        tracked = list(self.window.tracked.values())
        self._shard.save_prompts(each.prompt for each in tracked)
        version = getattr(self._core, "get_weight_version", lambda: "")
        self._shard.finish(
            self.window.batch(),
            [each.number for each in self._chosen],
            self._sequences,
            self.window.seen,
            requests=[each.record() for each in tracked],
            unrecorded=dict(self.window.unrecorded),
            weight_version=str(version()),
        )
        self._shard.complete()

    def _begin(self, writer: PassWriter, kind: str) -> None:
        """Opens the workers' part of a pass. Compiled code has nothing to tap."""
        if self._engine.compiled:
            return
        self._check(self._rpc("rlk_record_begin", writer.part(1), self._engine.shape, kind))
        self._tapping = True

    def _end(self, writer: PassWriter, kind: str) -> None:
        """Closes a pass in the workers, if they have a part in it, and here."""
        if self._tapping:
            self._tapping = False
            self._check(self._rpc("rlk_record_end"))
        with writer:
            writer.finish(self._engine.unexposed(kind))

    def _tap(self, request: str, number: int, first: int) -> None:
        if self._tapping:
            self._rpc("rlk_record_add", request, number, first)

    def _untap(self, request: str) -> None:
        if self._tapping:
            self._rpc("rlk_record_remove", request)

    @staticmethod
    def _check(failures: list[str]) -> None:
        if said := next(filter(None, failures), ""):
            raise TraceNotWritten(said)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._core.model_executor.collective_rpc(method, args=args)
