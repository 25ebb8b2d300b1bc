"""The shard that a rank writes for a step: complete, or not there."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlk_align.engines.base import Engine
from rlk_align.engines.manifest import write_manifest
from rlk_align.engines.process.job import Job
from rlk_align.engines.process.plan import KEEP_LOGPROBS
from rlk_align.engines.row_checks import row_checks
from rlk_align.errors import BadOption, ToolError
from rlk_align.model.prompts import Prompt, TokenBatch, save_prompts
from rlk_align.model.sites import model_sites
from rlk_align.record.shared.choose import prefix_hash
from rlk_align.record.shared.layout import (
    PARTIAL,
    REASON,
    RECORDING,
    RecordingRecord,
    step_folder,
)
from rlk_align.record.shared.together import on_all, on_first
from rlk_align.results import SideName
from rlk_align.trace.checksums import add_checksums
from rlk_align.trace.records import save_record, writing
from rlk_align.trace.schema import TRACE_FILES
from rlk_align.trace.writer import KeepValues, PassWriter

SCORED = ("prefill", "prefill.untapped", "prefill.repeat")
"""A pass that scores sequences, and its controls."""


class KeepWithin:
    """Keeps the values of all rows until they reach a budget; log-probs are always kept."""

    def __init__(self, budget: int, row_bytes: dict[str, int]) -> None:
        """`row_bytes`: the bytes of a row of each site."""
        self.left, self._row_bytes = budget, row_bytes

    def __call__(self, site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Bool `[N]` over rows at (sample, position), int `[N]` each."""
        if site == "logprob":
            return np.ones(len(sample), dtype=bool)
        size = len(sample) * self._row_bytes[site]
        if size > self.left:
            return np.zeros(len(sample), dtype=bool)
        self.left -= size
        return np.ones(len(sample), dtype=bool)


class SideFolder:
    """The folder of one side, which one process of each rank writes to."""

    def __init__(self, folder: str | Path, side: SideName, budget: int, rank: int = 0) -> None:
        """Raises ToolError if another process records into the folder."""
        self.path, self.side, self._budget = Path(folder), side, budget
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / f".rank-{rank}.lock").open("w")
        self._hold(self._lock)

    def _hold(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ToolError(
                f"{self.path}: another process records into this folder",
                "give each job a folder of its own",
            ) from error

    def close(self) -> None:
        """Lets another process record into the folder."""
        self._lock.close()

    @contextmanager
    def shard(self, step: int) -> Iterator["Shard"]:
        """The shard of a step, which gets its name when the context ends without an error. Raises
        BadOption if the step is recorded already."""
        shard = self.begin(step)
        with shard.abandoned_on_error():
            yield shard
            shard.complete()

    def begin(self, step: int) -> "Shard":
        """A shard that the caller completes or abandons. Raises BadOption if the step is recorded
        already."""
        final = step_folder(self.path, step) / "rank-0"
        if final.exists():
            raise BadOption(
                f"step {step} is recorded already: {final}",
                "a new job needs a folder of its own; or remove that step",
            )
        partial = final.with_name(final.name + PARTIAL)
        with writing(partial):
            # What a killed process left is incomplete.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return Shard(partial, self.side, step, self._budget)


class Shard:
    """The recording of one step by one rank, while it is written."""

    files: tuple[str, ...] = TRACE_FILES
    """The files outside the passes."""
    writers: type[PassWriter] = PassWriter
    """What writes a pass."""

    def __init__(self, path: Path, side: SideName, step: int, budget: int) -> None:
        self.path, self._side, self._step, self._budget = path, side, step, budget
        self.about = path
        """The folder that describes the step: its weights, attributes and environment."""
        self._passes: list[str] = []

    @property
    def rank_fields(self) -> dict[str, Any]:
        """The fields of the record that say which rank writes it."""
        return {}

    def describe(self, engine: Engine, prompts: Iterable[Sequence[int]]) -> None:
        """Writes the prompts of the step, the digests of the live parameters, the attributes and
        the environment."""
        job = Job(
            engine=engine.spec,
            model=engine.model_path,
            folder=self.about,
            key=f"{self._side} step {self._step}",
            prompts=self.about / "prompts.jsonl",
            tokens=None,
            passes=(),
            max_new_tokens=0,
            seed=0,
            budget=self._budget,
            layers=None,
            sites=(),
        )
        ranks = engine.ranks
        on_first(ranks, lambda: self.save_prompts(prompts))
        on_all(ranks, lambda: write_manifest(job, engine, {}))
        self._engine = engine

    def save_prompts(self, prompts: Iterable[Sequence[int]]) -> None:
        """Writes the prompts of the step."""
        named = {prefix_hash(ids): tuple(ids) for ids in prompts}
        save_prompts(
            [Prompt(name, None, ids) for name, ids in named.items()], self.about / "prompts.jsonl"
        )

    def writer(self, name: str) -> PassWriter:
        """The writer of a pass or of a control, which the caller finishes."""
        vocab = self._engine.shape.vocab
        if "." in name:
            return self.open_pass(name, KEEP_LOGPROBS, statistics=False, vocab=vocab)
        # Some engines compute some sites of a 16-bit model in float32.
        row_bytes = {site.name: 4 * site.features for site in model_sites(self._engine.shape)}
        keep = KeepWithin(self._budget, row_bytes)
        return self.open_pass(name, keep, checks=row_checks(self._engine), vocab=vocab)

    def open_pass(self, name: str, keep: KeepValues, **more: Any) -> PassWriter:
        """The writer of a pass, with these arguments of `PassWriter`."""
        self._passes.append(name)
        return self.writers(self.path / name, keep, **more)

    def finish(
        self,
        batch: TokenBatch,
        chosen: Sequence[int],
        sequences: int,
        seen: int,
        **of_engine: Any,
    ) -> None:
        """Writes the tokens and the checksums. `chosen`: the samples that remain; `of_engine`: the
        fields of the record that only some engines know."""
        with writing(self.path):
            batch.save(self.path / "tokens.parquet")
        record = RecordingRecord(
            side=self._side,
            step=self._step,
            sequences=sequences,
            seen=seen,
            chosen=list(chosen),
            passes=self._passes,
            **self.rank_fields,
            **of_engine,
        )
        save_record(record, self.path / RECORDING)
        passes = [f"{name}/pass.json" for name in self._passes]
        add_checksums(self.path, (*self.files, RECORDING, *passes))

    def complete(self) -> None:
        """Gives the shard its name."""
        final = self.path.with_name(self.path.name.removesuffix(PARTIAL))
        with writing(final):
            os.replace(self.path, final)

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Gives the shard up if an error leaves the context."""
        try:
            yield
        except BaseException as error:
            self.abandon(str(error) or type(error).__name__)
            raise

    def abandon(self, reason: str) -> None:
        """Removes what was written, and leaves the reason, if the file system takes it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.mkdir(parents=True)
            (self.path / REASON).write_text(reason, encoding="utf-8")


def sequence_name(ids: Sequence[int]) -> str:
    """The name of a sequence in reports: the first digits of its hash."""
    return prefix_hash(ids)[:12]
