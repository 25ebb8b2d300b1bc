"""The recorder in vLLM: a general plugin, switched on by the environment variable RLK_RECORD.

    RLK_RECORD=records/rollout RLK_RECORD_SEQUENCES=8 python my_job.py

It records the calls of `LLM.generate` and `LLM.chat` whose number, counted from 0, is a multiple
of RLK_RECORD_EVERY (by default 1), as the step of that number. Then it scores the recorded
sequences, which is the `prefill` pass of the comparison, with its controls. RLK_RECORD_BUDGET is
the number of bytes of values that a pass keeps. Importing this module imports neither torch nor
vLLM.
"""

import os
from typing import Any

from rlk_align.errors import BadOption
from rlk_align.record.settings import FOLDER, Settings

WORKER = "rlk_align.engines.vllm.worker.WorkerExtension"
SEPARATE = "VLLM_ENABLE_V1_MULTIPROCESSING"


def plugin() -> None:
    """The entry point that vLLM calls in each of its processes. A second call does nothing."""
    if not os.environ.get(FOLDER):
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    if getattr(LLM, "_rlk_records", False):
        return
    LLM._rlk_records = True
    _patch_configuration(EngineArgs)
    _patch_run(LLM)

    def refuse(*_: Any, **__: Any) -> None:
        raise BadOption(
            f"{FOLDER}: a server or an asynchronous engine is not recorded, only vllm.LLM",
            f"unset {FOLDER}; rlk-align compare --tokens DUMP scores the ids of a dump again",
        )

    AsyncLLM.__init__ = refuse


def _patch_configuration(arguments: Any) -> None:
    """Has vLLM run the model in this process, with the methods of our worker extension."""
    original = arguments.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        Settings.read()
        if self.worker_extension_cls not in ("", WORKER):
            raise BadOption(
                f"{FOLDER}: the job has a worker extension, {self.worker_extension_cls}, and vLLM "
                "takes one",
                f"unset {FOLDER}",
            )
        if not self.enforce_eager:
            raise BadOption(
                f"{FOLDER}: compiled code and CUDA graphs hide the operators",
                f"record with enforce_eager=True, or unset {FOLDER}",
            )
        if os.environ.get("RLK_KERNELS", "0") not in ("", "0"):
            raise BadOption(f"{FOLDER}: RLK_KERNELS=1 is not recorded", "unset one of them")
        os.environ[SEPARATE] = "0"
        self.worker_extension_cls = WORKER
        return original(self, *args, **kwargs)

    arguments.create_engine_config = create_engine_config


def _patch_run(llm_class: Any) -> None:
    """Has each run of all waiting requests recorded."""
    original = llm_class._run_engine

    def _run_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, "_rlk_recorder", None)
        if recorder is None:
            from rlk_align.record.rollout import RolloutRecorder

            settings = Settings.read()
            assert settings is not None
            recorder = self._rlk_recorder = RolloutRecorder(self, settings)
        return recorder.run(lambda: original(self, *args, **kwargs))

    llm_class._run_engine = _run_engine
