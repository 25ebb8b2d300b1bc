"""The recorder in vLLM: a general plugin, switched on by the environment variable RLK_RECORD.

    RLK_RECORD=records/rollout RLK_RECORD_SEQUENCES=8 python my_job.py

    RLK_RECORD=records/rollout RLK_RECORD_SEQUENCES=8 RLK_RECORD_WINDOW=512 vllm serve MODEL

It records the calls of `LLM.generate` and `LLM.chat` whose number, counted from 0, is a multiple
of RLK_RECORD_EVERY (by default 1), as the step of that number. Then it scores the recorded
sequences, which is the `prefill` pass of the comparison, with its controls. RLK_RECORD_BUDGET is
the number of bytes of values that a pass keeps. In a server, or another asynchronous engine, each
RLK_RECORD_WINDOW requests make a step; with RLK_RECORD_REQUESTS, only those whose ids begin with
it. Importing this module imports neither torch nor vLLM.
"""

import functools
import os
from typing import Any

from rlk_align.errors import BadOption
from rlk_align.record.rollout.settings import FOLDER, Settings

WORKER = "rlk_align.record.rollout.vllm.worker.RecordingWorker"
SEPARATE = "VLLM_ENABLE_V1_MULTIPROCESSING"


def plugin() -> None:
    """The entry point that vLLM calls in each of its processes. A second call does nothing."""
    if not os.environ.get(FOLDER):
        return
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.core import EngineCoreProc

    if getattr(LLM, "_rlk_records", False):
        return
    LLM._rlk_records = True
    _patch_configuration(EngineArgs, AsyncEngineArgs)
    _patch_run(LLM)
    _patch_core(EngineCoreProc)


def _patch_configuration(arguments: Any, of_server: Any) -> None:
    """Has vLLM's workers have the methods of our extension, and an LLM run its engine core in this
    process. Refuses what is not recorded, before anything starts."""
    original = arguments.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = Settings.read()
        assert settings is not None
        if self.worker_extension_cls not in ("", WORKER):
            raise BadOption(
                f"{FOLDER}: the job has a worker extension, {self.worker_extension_cls}, and vLLM "
                "takes one",
                f"unset {FOLDER}",
            )
        if os.environ.get("RLK_KERNELS", "0") not in ("", "0"):
            raise BadOption(f"{FOLDER}: RLK_KERNELS=1 is not recorded", "unset one of them")
        server = isinstance(self, of_server)
        if not server:
            os.environ[SEPARATE] = "0"
        self.worker_extension_cls = WORKER
        config = original(self, *args, **kwargs)
        from rlk_align.record.rollout.vllm.engine import described_engine
        from rlk_align.record.shared.shard import SideFolder

        described_engine(config)
        if server:
            # The engine core locks the folder; here a second job is refused before it starts.
            SideFolder(settings.folder, "rollout", settings.budget).close()
        return config

    arguments.create_engine_config = create_engine_config


def _patch_run(llm_class: Any) -> None:
    """Has each run of all waiting requests recorded."""
    original = llm_class._run_engine

    def _run_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, "_rlk_recorder", None)
        if recorder is None:
            from rlk_align.record.rollout.vllm.llm import RolloutRecorder

            settings = Settings.read()
            assert settings is not None
            recorder = self._rlk_recorder = RolloutRecorder(self, settings)
        return recorder.run(lambda: original(self, *args, **kwargs))

    llm_class._run_engine = _run_engine


def _patch_core(core_class: Any) -> None:
    """Shows the requests and the outputs of an engine core in a process of its own to a recorder,
    and what may change its weights."""

    def before(name: str, show: Any) -> None:
        original = getattr(core_class, name)

        # vLLM reads the parameters of some of these methods.
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            show(self, *args)
            return original(self, *args, **kwargs)

        setattr(core_class, name, method)

    def steps(name: str) -> None:
        original = getattr(core_class, name)

        def step(self: Any) -> Any:
            outputs, executed = original(self)
            if recorder := getattr(self, _RECORDER, None):
                recorder.take(outputs or {})
            return outputs, executed

        setattr(core_class, name, step)

    def offer(core: Any, request: Any, *_: Any) -> None:
        if recorder := _recorder(core):
            recorder.offer(request)

    def abort(core: Any, requests: list[str]) -> None:
        if recorder := getattr(core, _RECORDER, None):
            recorder.aborted(requests)

    def end(core: Any, reason: str) -> None:
        if recorder := getattr(core, _RECORDER, None):
            recorder.end_step(reason)

    before("add_request", offer)
    before("abort_requests", abort)
    for name in ("step", "step_with_batch_queue"):
        steps(name)
    for name, reason in _ENDS.items():
        before(name, lambda core, *_, reason=reason: end(core, reason))


_RECORDER = "_rlk_recorder"
_ENDS = {
    "pause_scheduler": "the engine paused",
    "sleep": "the engine was sent to sleep",
    "collective_rpc": "a client called the workers, which may have changed the weights",
}
"""What an engine core does that ends the step -> why requests that it interrupts are left out."""


def _recorder(core: Any) -> Any:
    """The recorder of an engine core; None if there can be none: the server goes on without it."""
    if not hasattr(core, _RECORDER):
        from rlk_align.record.rollout.vllm.server import start_server

        setattr(core, _RECORDER, start_server(core))
    return getattr(core, _RECORDER)
