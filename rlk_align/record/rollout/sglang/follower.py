"""What a rank that writes nothing has in the place of rank 0's shard, so that all ranks do the
same."""

from pathlib import Path
from typing import Any

from rlk_align.record.shared.shard import Shard
from rlk_align.trace.writer import PassWriter


class FollowerShard(Shard):
    """The shard of a rank that takes part in gathering alone."""

    def __init__(self, path: Path, step: int) -> None:
        """`path`: a folder that is not made, in one with the name of the step."""
        super().__init__(path, "rollout", step, 0)

    def writer(self, name: str) -> PassWriter:
        return _Unwritten()

    def save_prompts(self, prompts: Any) -> None:
        return

    def finish(self, *_: Any, **__: Any) -> None:
        return

    def complete(self) -> None:
        return

    def abandon(self, reason: str) -> None:
        return


class _Unwritten(PassWriter):
    """A writer that writes nothing."""

    def __init__(self) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        return

    def __exit__(self, *_: Any) -> None:
        return

    def took_from_cache(self, *_: Any) -> None:
        return

    def finish(self, *_: Any) -> None:
        return
