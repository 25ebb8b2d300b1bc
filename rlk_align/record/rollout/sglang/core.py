"""SGLang's scheduler. Each tensor-parallel rank has one, which gets the same requests; so each has
the recorder, which decides the same. Rank 0 writes."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlk_align.engines.sglang.session import Request, tokenized
from rlk_align.errors import EngineFailed, RlkError, TraceNotWritten
from rlk_align.record.rollout.core import Core, LiveRequest
from rlk_align.record.rollout.live_pass import LivePass
from rlk_align.record.rollout.settings import Settings
from rlk_align.record.rollout.sglang.engine import RecordedSGLang, live_engine
from rlk_align.record.rollout.sglang.follower import FollowerShard
from rlk_align.record.rollout.sglang.taps import LiveTaps
from rlk_align.record.shared.layout import next_step, step_folder
from rlk_align.record.shared.shard import Shard, SideFolder
from rlk_align.record.shared.together import of_all, on_all
from rlk_align.trace.writer import PassWriter

log = logging.getLogger("sglang.srt.rlk_align")
T = TypeVar("T")


class SGLangCore(Core):
    """A scheduler, between its forwards."""

    engine: RecordedSGLang
    log = log

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        """Raises BadOption for a model that is not recorded yet, ToolError if another process
        records into the folder."""
        self._scheduler = scheduler
        self.engine = live_engine(scheduler)
        self.context = int(scheduler.max_req_input_len)
        self._ranks = self.engine.ranks
        self._folder = self._on_first(
            lambda: SideFolder(settings.folder, "rollout", settings.budget)
        )
        self._pass: LivePass | None = None

    def _on_first(self, act: Callable[[], T]) -> T | None:
        """The result of `act` on rank 0; None on the others."""
        return on_all(self._ranks, lambda: None if self._ranks.rank else act())

    def next_step(self) -> int:
        own = None if self._folder is None else next_step(self._folder.path)
        [number, *_] = of_all(self._ranks, own)
        assert number is not None
        return number

    def begin_shard(self, step: int) -> Shard:
        folder = self._folder
        shard = self._on_first(lambda: folder and folder.begin(step))
        return shard or FollowerShard(step_folder(Path(), step) / "none", step)

    def together(self, act: Callable[[], T]) -> T:
        def safe() -> T:
            try:
                return act()
            except RlkError:
                raise
            except Exception as error:
                # An error of ours: the other ranks must not wait for this one.
                raise EngineFailed(f"{type(error).__name__}: {error}") from error

        return on_all(self._ranks, safe)

    def describe(self, shard: Shard, first: LiveRequest) -> None:
        shard.describe(self.engine, [first.prompt])

    def begin_pass(self, writer: PassWriter, kind: str) -> None:
        runner, ranks, shape = self.engine.runner, self._ranks, self.engine.shape

        def taps(tap: Any, samples: dict[str, int], wanted: list[range]) -> LiveTaps:
            return LiveTaps(runner, ranks, shape, tap, None, samples, wanted)

        self._pass = LivePass(None if ranks.rank else writer.part(1)(), taps)

    def end_pass(self) -> None:
        current, self._pass = self._pass, None
        if current is not None and (failure := current.close()):
            raise TraceNotWritten(failure)

    def tap(self, request: str, sample: int, wanted: range) -> None:
        if self._pass is not None:
            self._pass.add(request, sample, wanted)

    def untap(self, request: str) -> None:
        if self._pass is not None:
            self._pass.remove(request)

    def score(self, name: str, scored: LiveRequest) -> None:
        request = Request(
            rid=name,
            ids=scored.ids,
            max_new_tokens=1,
            temperature=1.0,
            logprobs_from=len(scored.prompt) - 1,
            salt=name,
        )
        self._scheduler.handle_generate_request(tokenized(request))

    def abort(self, requests: Sequence[str]) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        for name in requests:
            self._scheduler.abort_request(AbortReq(rid=name))

    def weight_version(self) -> str:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version or "")
