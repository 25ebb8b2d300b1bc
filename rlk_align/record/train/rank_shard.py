"""The shards of a job of several ranks. SIDE/step-00000300/ has

shared/     what all ranks have in common: trace.json, weights.parquet, and model/ with the weights;
            it is complete before any forward of the step
rank-N/     the passes of one rank, and the tokens of its sequences
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlk_align.engines.base import Engine
from rlk_align.engines.process.ranks import Ranks
from rlk_align.errors import BadOption
from rlk_align.record.shared.layout import PARTIAL, RECORDING, SHARED, SHARED_FILES, step_folder
from rlk_align.record.shared.shard import Shard, SideFolder
from rlk_align.record.shared.together import of_all, on_all
from rlk_align.trace.checksums import add_checksums
from rlk_align.trace.records import writing


class RankFolder(SideFolder):
    """The folder of a side in which each rank of a job writes its shards."""

    def __init__(self, folder: str | Path, budget: int, ranks: Ranks, replica: int) -> None:
        """`replica`: as `RecordingRecord.replica`. Raises ToolError on every rank if another
        process records into the folder."""
        self._ranks, self._replica = ranks, replica
        on_all(ranks, lambda: self._take(folder, budget))
        # One number for all ranks: the shards of another job have another.
        self._job = of_all(ranks, secrets.token_hex(16))[0]

    def _take(self, folder: str | Path, budget: int) -> None:
        super().__init__(folder, "train", budget, self._ranks.rank)

    def begin(self, step: int) -> Shard:
        """This rank's shard of a step; all ranks call this, and each completes or abandons its own.
        Raises BadOption on every rank if a shard of the step is complete."""
        folder = step_folder(self.path, step)
        partial = folder / f"rank-{self._ranks.rank}{PARTIAL}"
        on_all(self._ranks, lambda: self._clear(folder, step))
        on_all(self._ranks, lambda: _make_anew(partial))
        return RankShard(partial, step, self._budget, self._ranks, self._replica, self._job)

    def _clear(self, folder: Path, step: int) -> None:
        """Removes what an incomplete recording left, on rank 0."""
        complete = [p.parent for p in folder.glob(f"rank-*/{RECORDING}")]
        names = sorted(p.name for p in complete if not p.name.endswith(".partial"))
        if names:
            raise BadOption(
                f"step {step} is recorded already: {folder} has {', '.join(names)}",
                "a new job needs a folder of its own; or remove that step",
            )
        if self._ranks.rank == 0:
            with writing(folder):
                for name in (SHARED, f"{SHARED}.partial"):
                    shutil.rmtree(folder / name, ignore_errors=True)
                (folder / f"{SHARED}.partial").mkdir(parents=True)


def _make_anew(folder: Path) -> None:
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


class RankShard(Shard):
    """The shard of one rank among several."""

    files = ("tokens.parquet",)

    def __init__(
        self, path: Path, step: int, budget: int, ranks: Ranks, replica: int, job: str
    ) -> None:
        super().__init__(path, "train", step, budget)
        self._ranks, self._replica, self._job = ranks, replica, job
        self.about = path.with_name(f"{SHARED}.partial")

    def describe(self, engine: Engine, prompts: Iterable[Sequence[int]]) -> None:
        """All ranks call this; rank 0 writes, and gives the folder its name."""
        super().describe(engine, prompts)
        on_all(self._ranks, self._complete)

    def _complete(self) -> None:
        if self._ranks.rank:
            return
        add_checksums(self.about, SHARED_FILES)
        with writing(self.about):
            os.replace(self.about, self.about.with_name(SHARED))

    @property
    def rank_fields(self) -> dict[str, Any]:
        ranks = self._ranks
        return {
            "rank": ranks.rank,
            "ranks": ranks.world,
            "replica": self._replica,
            "job": self._job,
        }
