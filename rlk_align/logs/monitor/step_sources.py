"""The sources of a run's steps: a folder of dumps, a growing file, or an imported run.

A step is yielded once, when it is complete. prime-rl marks a complete step with a file STABLE, and
the files of `logs.writers` have the number of the step's files in their names. In any other folder
a step is complete once a file of a later step exists (NeMo-RL overwrites a repeated step), and in a
growing file once a later step begins. When the run has ended, every step is complete.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row, batches
from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.dumps.record import SCHEMA
from rlk_align.logs.dumps.table import sequences_of
from rlk_align.logs.monitor.growing_file import GrowingFile
from rlk_align.logs.monitor.metrics_log import MetricsLog
from rlk_align.logs.monitor.record import StepRecord
from rlk_align.logs.monitor.run_monitor import RunMonitor
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.files import first_object
from rlk_align.logs.readers.jsonl import row_of_line
from rlk_align.logs.readers.prime_rl import STABLE
from rlk_align.logs.readers.registry import READERS, reader
from rlk_align.progress import silent
from rlk_align.trace.run import IMPORTED
from rlk_align.trace.run_folder import RUN_JSON, schema_of

STEP_IN_NAME = {
    "nemo-rl": r"train_data_step(\d+)\.jsonl$",
    "prime-rl": r"step_(\d+)/rank_\d+\.jsonl$",
    "miles": r"train_data/(\d+)_\d+\.pt$",
    "slime": r"train_data/(\d+)\.pt$",
    "jsonl": r"(?:^|/)step_(\d+)(?:_rank_\d+_of_\d+)?\.(?:jsonl|parquet)$",
}
"""Format -> the pattern of the step in a file's path."""


class StepSource(Protocol):
    """The steps of one run."""

    name: str

    def poll(self, monitor: RunMonitor, ended: bool) -> Iterator[StepRecord]:
        """Yields the records of complete steps that were not yielded before. `ended`: nothing more
        will be written. Raises DumpError."""
        ...


def open_source(path: Path) -> StepSource:
    """Returns the source for a path. Raises DumpError for an unknown kind of source."""
    if not path.exists():
        raise DumpError(f"{path} does not exist", "name a run's folder, or its log of metrics")
    if path.is_dir():
        if (path / RUN_JSON).is_file() and schema_of(path) == IMPORTED:
            return ImportedSource(path)
        return FolderSource(path)
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        raise DumpError(
            f"{path}: only JSON Lines can be followed as a single file",
            "name its folder, or import it with `rlk-align import`",
        )
    if "schema" in first_object(path) or "token_ids" in first_object(path):
        return LinesSource(path)
    return MetricsLog(path)


class ImportedSource:
    """An imported run, whose steps are all complete."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._run: ImportedRun | None = ImportedRun.open(self.name)

    def poll(self, monitor: RunMonitor, ended: bool) -> Iterator[StepRecord]:
        run, self._run = self._run, None
        if run is not None:
            for step, parts in run.steps():
                yield monitor.sequences(step, parts)


class FolderSource:
    """A folder into which a framework dumps its steps."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder
        self._reader: Reader | None = None
        self._last = -1

    def poll(self, monitor: RunMonitor, ended: bool) -> Iterator[StepRecord]:
        steps = self._steps()
        newest = max(steps, default=-1)
        for step in sorted(s for s in steps if s > self._last):
            if self._complete(steps[step], ended or step < newest):
                assert self._reader is not None
                rows = self._reader.read(steps[step], Findings(), silent)
                self._last = step
                yield monitor.sequences(step, map(sequences_of, batches(rows)))
        if ended and self._reader is None:
            names = ", ".join(STEP_IN_NAME)
            raise DumpError(
                f"{self.folder} has no step in a known format",
                f"known formats are {names}, the last with files named step_N.jsonl; import files "
                "with other names with `rlk-align import` first",
            )

    def _complete(self, files: list[Path], followed: bool) -> bool:
        assert self._reader is not None
        if self._reader.name == "prime-rl":
            return all((file.parent / STABLE).is_file() for file in files)
        if self._reader.name == "jsonl" and any("_of_" in file.stem for file in files):
            return all(file.stem.endswith(f"_of_{len(files)}") for file in files)
        return followed

    def _steps(self) -> dict[int, list[Path]]:
        """The files of each step in the first format that has any."""
        names = [self._reader.name] if self._reader else [n for n in STEP_IN_NAME if n in READERS]
        for name in names:
            steps: dict[int, list[Path]] = {}
            for file in reader(name).files(self.folder):
                match = re.search(STEP_IN_NAME[name], file.absolute().as_posix())
                if match:
                    steps.setdefault(int(match[1]), []).append(file)
            if steps:
                self._reader = reader(name)
                return steps
        return {}


class LinesSource:
    """A growing neutral file, in which a step ends where a later one begins."""

    def __init__(self, path: Path) -> None:
        self.name, self._file = str(path), GrowingFile(path)
        self._step: int | None = None
        self._rows: list[Row] = []

    def poll(self, monitor: RunMonitor, ended: bool) -> Iterator[StepRecord]:
        for where, line in self._file.lines(ended):
            try:
                row = row_of_line(line)
            except ValueError as error:
                raise DumpError(f"{where}: {error}", f"each line must be a {SCHEMA}") from error
            step = row["step"]
            if step is None or (self._step is not None and step < self._step):
                raise DumpError(
                    f"{where}: step {step} follows step {self._step}",
                    "the steps of a followed file must be in order; "
                    "`rlk-align import` reads any order",
                )
            if step != self._step:
                yield from self._finished(monitor)
            self._step = step
            self._rows.append(row)
        if ended:
            yield from self._finished(monitor)

    def _finished(self, monitor: RunMonitor) -> Iterator[StepRecord]:
        if self._step is not None and self._rows:
            rows, self._rows = self._rows, []
            yield monitor.sequences(self._step, map(sequences_of, batches(rows)))
