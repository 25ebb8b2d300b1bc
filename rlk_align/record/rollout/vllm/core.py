"""vLLM's engine core, which runs the requests of a server."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from rlk_align.errors import TraceNotWritten
from rlk_align.record.rollout.core import Core, LiveRequest
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.vllm.engine import RecordedEngine, live_engine
from rlk_align.record.rollout.vllm.request import VLLMRequest
from rlk_align.record.shared.layout import ADAPTER, next_step
from rlk_align.record.shared.shard import Shard, SideFolder
from rlk_align.trace.writer import PassWriter

log = logging.getLogger("vllm.rlk_align")


class _EngineCoreLLM:
    """What the adapter of vLLM asks of an LLM; the engine core has the workers."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.llm_engine = core.vllm_config

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._core.model_executor.collective_rpc(method, args=args)


class VLLMCore(Core):
    """An engine core, whose workers have the methods of `RecordingWorker`."""

    engine: RecordedEngine
    log = log

    def __init__(self, core: Any, settings: Settings) -> None:
        """Raises BadOption for a model that is not recorded yet, ToolError if another process
        records into the folder."""
        self._core = core
        self.engine = live_engine(_EngineCoreLLM(core), core.vllm_config)
        self.context = core.vllm_config.model_config.max_model_len
        self._folder = SideFolder(settings.folder, "rollout", settings.budget)
        self._tapping = False

    def next_step(self) -> int:
        return next_step(self._folder.path)

    def begin_shard(self, step: int) -> Shard:
        return self._folder.begin(step)

    def describe(self, shard: Shard, first: LiveRequest) -> None:
        assert isinstance(first, VLLMRequest)
        self.engine.use_adapter(first.lora, shard.about / ADAPTER)
        shard.describe(self.engine, [first.prompt])

    def begin_pass(self, writer: PassWriter, kind: str) -> None:
        # Compiled code has nothing to tap.
        if not self.engine.compiled:
            self._check(self._rpc("rlk_record_begin", writer.part(1), self.engine.shape, kind))
            self._tapping = True

    def end_pass(self) -> None:
        if self._tapping:
            self._tapping = False
            self._check(self._rpc("rlk_record_end"))

    def tap(self, request: str, sample: int, wanted: range) -> None:
        if self._tapping:
            self._rpc("rlk_record_add", request, sample, wanted)

    def untap(self, request: str) -> None:
        if self._tapping:
            self._rpc("rlk_record_remove", request)

    def score(self, name: str, scored: LiveRequest) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        assert isinstance(scored, VLLMRequest)
        scoring = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(scored.ids),
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=scored.lora,
            cache_salt=name,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(scoring))

    def abort(self, requests: Sequence[str]) -> None:
        self._core.abort_requests(list(requests))

    def weight_version(self) -> str:
        return str(getattr(self._core, "get_weight_version", lambda: "")())

    @staticmethod
    def _check(failures: list[str]) -> None:
        if said := next(filter(None, failures), ""):
            raise TraceNotWritten(said)

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._core.model_executor.collective_rpc(method, args=args)
