"""The RUN folder: one layout for capture, compare, gate and report.

RUN/
  run.json            what was asked for, and where the captures lie
  captures/NAME/      a Trace each, named after everything that decides its content
  comparison.json     what the comparison found
  comparison.parquet  the same, row by row
  verdict.json        the verdict on it
  probe.json          who introduced its differences, where the run was probed
  checksums.json      of all these; written last, so its presence means complete
"""

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from rlk_align.errors import BadOption, CorruptTrace, Interrupted, ToolError
from rlk_align.results import Comparison, EdgeName, Kind
from rlk_align.trace.checksums import CHECKSUMS, Checksums, add_checksums, read_checksums
from rlk_align.trace.records import REPAIR, Record, load_record, save_record, writing
from rlk_align.trace.schema import check_trace

if TYPE_CHECKING:
    import pyarrow as pa

PROBE = "probe.json"
ROWS = "comparison.parquet"
CONCLUSIONS = ("comparison.json", ROWS, "verdict.json")
RUN_FILES = ("run.json", *CONCLUSIONS, PROBE, CHECKSUMS)
R = TypeVar("R", bound=BaseModel)
RUNS = Path("rlk-runs")
"""Where runs go by default, below the current directory."""


def fingerprint(*parts: object) -> str:
    """A short stable name for a combination of settings."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


Role = Literal["rollout", "train", "capture"]
"""What a capture is to a run; `capture` is the only one of a run that compares nothing."""


class RunRecord(Record):
    """run.json."""

    schema_id: Literal["rlk-align/run/2"] = "rlk-align/run/2"
    command: list[str]
    """The command line that reproduces it."""
    captures: Annotated[dict[Role, str], Field(min_length=1)]
    """Folders below the run."""
    judged: tuple[EdgeName, ...] = ()
    """The edges that a contract is held against."""
    allowed: tuple[Kind, ...] = ()
    """Mismatches that the user chose to measure across."""


class Run:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, name: str) -> "Run":
        """A finished run, by folder or as `@last`. Raises BadOption where there is none,
        CorruptTrace where it did not finish or run.json is not what was written."""
        folder = Path(name)
        if name == "@last":
            pointer = RUNS / "last"
            if not pointer.is_file():
                raise BadOption(
                    f"there is no last run below {RUNS.absolute()}", "give the run's folder"
                )
            folder = Path(os.fsdecode(pointer.read_bytes()))
        run = cls(folder)
        if not (folder / "run.json").is_file():
            raise BadOption(
                f"{folder} is no run: run.json is not there",
                "give the folder that `capture -o` or `compare --run-dir` wrote",
            )
        if not (folder / CHECKSUMS).is_file():
            run._check_free()
            raise CorruptTrace(
                f"{folder} is not whole: the last command into it did not finish",
                f"run it again: {shlex.join(run.record.command)}",
            )
        run._checksums.check(folder, ["run.json"])
        return run

    def again(self) -> "Run":
        """The same run as it is now, finished meanwhile."""
        return Run(self.folder)

    @cached_property
    def _checksums(self) -> Checksums:
        return read_checksums(self.folder)

    @property
    def record(self) -> RunRecord:
        return load_record(RunRecord, self.folder / "run.json")

    def save(self, record: RunRecord) -> None:
        """Writes run.json and makes this the last run."""
        save_record(record, self.folder / "run.json")
        # Where nothing can be written here, there is no last run.
        with suppress(OSError):
            RUNS.mkdir(parents=True, exist_ok=True)
            (RUNS / "last").write_bytes(os.fsencode(self.folder.resolve()))

    def finish(self) -> None:
        """Writes the checksums of everything in it: from here on it may be read."""
        record = self.record
        conclusions = CONCLUSIONS if record.judged else ()
        captures = [f"{folder}/{CHECKSUMS}" for folder in record.captures.values()]
        probe = [PROBE] if (self.folder / PROBE).is_file() else []
        add_checksums(self.folder, ["run.json", *conclusions, *probe, *captures])

    def capture_folder(self, role: Role) -> Path:
        """The trace of that role, or the only one that the run has. Raises BadOption where there
        is none, CorruptTrace where it is another than the run was finished with."""
        captures = self.record.captures
        name = captures.get(role)
        if name is None and len(captures) == 1:
            name = next(iter(captures.values()))
        if name is None:
            raise BadOption(
                f"{self.folder} holds no {role} capture", f"it holds: {', '.join(captures)}"
            )
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CorruptTrace(f"{self.folder}/run.json points outside the run: {name}", REPAIR)
        try:
            self._checksums.check(self.folder, [f"{name}/{CHECKSUMS}"])
        except CorruptTrace as error:
            where = (self.folder / path).resolve()
            raise CorruptTrace(
                f"{self.folder}: its {role} capture, {where}, is gone or was made again: "
                f"{error.message}",
                f"make this run again: {shlex.join(self.record.command)}",
            ) from error
        return self.folder / path

    def check(self) -> None:
        """Raises CorruptTrace where any file of the run is missing or is not what was written.

        Of a capture all but its checksums.json may be left behind: what was concluded stands
        without its values.
        """
        for role in self.record.captures:
            folder = self.capture_folder(role)
            if any(path.name != CHECKSUMS for path in folder.iterdir()):
                check_trace(folder)
        self._checksums.check(self.folder, self._checksums.files)

    def relative(self, folders: Mapping[Role, Path]) -> dict[Role, str]:
        """Captures as run.json names them; one that lies elsewhere is linked into the run, so that
        both may be moved together."""
        captures: dict[Role, str] = {}
        for role, folder in folders.items():
            here, there = self.folder.resolve(), folder.resolve()
            link = self.folder / "captures" / role
            if here not in there.parents:
                if link.is_dir() and not link.is_symlink():
                    # A copy that followed the links: what it holds stays.
                    link = link.with_name(f"{role}-{fingerprint(str(there))}")
                with writing(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.unlink(missing_ok=True)
                    target = os.path.relpath(there, link.parent.resolve())
                    link.symlink_to(target, target_is_directory=True)
                there = here / "captures" / link.name
            captures[role] = there.relative_to(here).as_posix()
        return captures

    @property
    def comparison(self) -> Comparison:
        """Raises BadOption for a run that compared nothing, CorruptTrace for a damaged one."""
        if not self.record.judged:
            raise BadOption(
                f"{self.folder} is a single capture: there is nothing to judge",
                "compare it with another: rlk-align compare RUN_A RUN_B",
            )
        self._checksums.check(self.folder, ["comparison.json"])
        return load_record(Comparison, self.folder / "comparison.json")

    def load_probe(self, kind: type[R]) -> R | None:
        """What a probe left, None where there was none; raises CorruptTrace for a damaged one."""
        if PROBE not in self._checksums.files:
            return None
        self._checksums.check(self.folder, [PROBE])
        return load_record(kind, self.folder / PROBE)

    def save_probe(self, probe: BaseModel) -> None:
        """The run is not whole again before it is finished."""
        with writing(self.folder):
            (self.folder / CHECKSUMS).unlink(missing_ok=True)
        save_record(probe, self.folder / PROBE)

    def invalidate(self) -> None:
        """Takes away what an earlier command concluded: nothing of it may be judged as ours."""
        with writing(self.folder):
            for name in (CHECKSUMS, *CONCLUSIONS, PROBE):
                (self.folder / name).unlink(missing_ok=True)

    def save_comparison(self, comparison: Comparison, rows: "pa.Table") -> None:
        from rlk_align.token_table import save_rows

        save_record(comparison, self.folder / "comparison.json")
        with writing(self.folder / ROWS):
            save_rows(rows, self.folder / ROWS)

    @property
    def has_rows(self) -> bool:
        """Whether the comparison was kept row by row; older runs were not."""
        return ROWS in self._checksums.files

    def rows(self, columns: Sequence[str] | None = None) -> "pa.Table":
        """The comparison row by row (see `rlk_align.token_table`), or these columns of it. Raises
        CorruptTrace for a damaged one."""
        from rlk_align.token_table import load_rows

        self._checksums.check(self.folder, [ROWS])
        return load_rows(self.folder / ROWS, columns)

    def save_verdict(self, verdict: dict) -> None:
        with writing(self.folder):
            text = json.dumps(verdict, indent=1, allow_nan=False)
            (self.folder / "verdict.json").write_text(text + "\n", encoding="utf-8")

    def check_output(self, path: Path) -> None:
        """Raises BadOption for a path at which a file of the run lies, or will."""
        inside = self.folder.resolve() in path.resolve().parents
        if inside and (path.name in RUN_FILES or path.parent.resolve() != self.folder.resolve()):
            raise BadOption(f"{path} is a file of the run itself", "write the output elsewhere")

    def _check_free(self) -> None:
        """Raises ToolError while another process works in the folder."""
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
        """Two processes must not capture into one folder at once. Raises BadOption where a file
        is in its place, ToolError while another process holds it, Interrupted on Ctrl-C inside."""
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
                    "the same command goes on from there",
                ) from interrupt
