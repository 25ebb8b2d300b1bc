"""A run's folder of any kind: found by name, checked, and locked while a process writes to it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from rlk_align.errors import BadOption, CorruptTrace, Interrupted, ToolError
from rlk_align.trace.checksums import CHECKSUMS, Checksums, read_checksums
from rlk_align.trace.records import writing

RUNS = Path("rlk-runs")
"""The default folder of runs, below the current directory."""
RUN_JSON = "run.json"


def find_run(name: str) -> Path:
    """The folder of a run, by its path or `@last`. Raises BadOption if there is no run."""
    folder = Path(name)
    if name == "@last":
        pointer = RUNS / "last"
        if not pointer.is_file():
            raise BadOption(
                f"there is no last run below {RUNS.absolute()}", "give the run's folder"
            )
        folder = Path(os.fsdecode(pointer.read_bytes()))
    if not (folder / RUN_JSON).is_file():
        raise BadOption(
            f"{folder} is not a run: it has no run.json",
            "give the folder that `capture -o`, `compare --run-dir` or `import -o` wrote",
        )
    return folder


def schema_of(folder: Path) -> str | None:
    """The schema in a run's run.json; None if it cannot be read."""
    try:
        record = json.loads((folder / RUN_JSON).read_bytes())
    except (OSError, ValueError):
        return None
    schema = record.get("schema_id") if isinstance(record, dict) else None
    return schema if isinstance(schema, str) else None


class RunFolder:
    """A run's folder. The schema in run.json distinguishes the kinds of runs."""

    files: ClassVar[tuple[str, ...]]
    """The files that may be at the top of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reopened(self) -> Self:
        """The same run as it is now; another command may have finished it since."""
        return type(self)(self.folder)

    @cached_property
    def _checksums(self) -> Checksums:
        return read_checksums(self.folder)

    def _check_whole(self, repair: str) -> None:
        """Raises CorruptTrace if the run did not finish or run.json was changed."""
        if not (self.folder / CHECKSUMS).is_file():
            self._check_free()
            raise CorruptTrace(
                f"{self.folder} is incomplete: the last command that wrote to it did not finish",
                repair,
            )
        self._checksums.check(self.folder, [RUN_JSON])

    def _remember(self) -> None:
        """Makes this the last run."""
        # In a folder without write permission there is no last run.
        with suppress(OSError):
            RUNS.mkdir(parents=True, exist_ok=True)
            (RUNS / "last").write_bytes(os.fsencode(self.folder.resolve()))

    def check_output(self, path: Path) -> None:
        """Raises BadOption for a path that belongs to a file of the run."""
        inside = self.folder.resolve() in path.resolve().parents
        if inside and (path.name in self.files or path.parent.resolve() != self.folder.resolve()):
            raise BadOption(f"{path} is a file of the run itself", "write the output elsewhere")

    def _check_free(self) -> None:
        """Raises ToolError while another process uses the folder."""
        with suppress(FileNotFoundError, PermissionError), (self.folder / ".lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._in_use() from error

    def _in_use(self) -> ToolError:
        return ToolError(
            f"{self.folder} is in use by another rlk-align", "wait for it, or choose another folder"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder, in which only one process may capture. Raises BadOption if the path is
        a file, ToolError while another process uses the folder, Interrupted on Ctrl-C inside."""
        if self.folder.exists() and not self.folder.is_dir():
            raise BadOption(f"{self.folder} is a file, and a run is a folder", "name another one")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._in_use() from error
            try:
                yield
            except KeyboardInterrupt as interrupt:
                raise Interrupted(
                    f"interrupted; what was finished is kept in {self.folder}",
                    "the same command continues from there",
                ) from interrupt
