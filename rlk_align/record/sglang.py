"""The recorder in SGLang: a general plug-in, switched on by the environment variable RLK_RECORD.

    RLK_RECORD=records/rollout RLK_RECORD_WINDOW=512 python -m sglang.launch_server --model-path M

Each RLK_RECORD_WINDOW requests make a step, in a server and in an `Engine`; a call of
`Engine.generate` that has fewer ends its step. Further variables: `rlk_align.record.vllm`.
Importing this module imports neither torch nor SGLang.
"""

import functools
import os
from typing import Any

from rlk_align.errors import RlkError
from rlk_align.record.rollout.settings import FOLDER, Settings

_END = "rlk_end_of_call"
"""A method of SGLang's Scheduler that does nothing; every call of a scheduler ends the step."""


def plugin() -> None:
    """The entry point that SGLang calls in each of its processes. It ends the process where it
    fails, because SGLang logs a plug-in's exceptions and serves without the plug-in. A second call
    does nothing."""
    if not os.environ.get(FOLDER):
        return
    try:
        Settings.read()
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers.scheduler import Scheduler
    except (RlkError, ImportError) as error:
        raise SystemExit(f"{FOLDER}: {error}") from error
    if hasattr(Scheduler, _END):
        return
    _patch_launch(Engine)
    _patch_generate(Engine)
    _patch_scheduler(Scheduler)


def _patch_launch(engine: Any) -> None:
    """Refuses what is not recorded before anything starts."""
    original = engine._launch_subprocesses.__func__

    @functools.wraps(original)
    def launch(cls: Any, server_args: Any, *args: Any, **more: Any) -> Any:
        from rlk_align.record.rollout.sglang.engine import check_arguments
        from rlk_align.record.shared.shard import SideFolder

        settings = Settings.read()
        assert settings is not None
        server_args.resolve_once()
        check_arguments(server_args)
        # The scheduler locks the folder; here a second job is refused before it starts.
        SideFolder(settings.folder, "rollout", settings.budget).close()
        return original(cls, server_args, *args, **more)

    engine._launch_subprocesses = classmethod(launch)


def _patch_generate(engine: Any) -> None:
    """Ends the step at the end of each call that waits for its responses."""
    original = engine.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **more: Any) -> Any:
        outputs = original(self, *args, **more)
        if not more.get("stream") and self.send_to_rpc is not None:
            self.collective_rpc(_END)
        return outputs

    engine.generate = generate


def _patch_scheduler(scheduler: Any) -> None:
    original = scheduler.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        from rlk_align.record.rollout.sglang.server import start_server

        self._rlk_recorder = start_server(self)

    scheduler.__init__ = __init__
    setattr(scheduler, _END, lambda self: None)
