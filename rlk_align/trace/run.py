"""The RUN folder: one layout for capture, compare, gate and report.

RUN/
  run.json            what was asked for, and where the captures lie
  captures/NAME/      a Trace each, named after everything that decides its content
  comparison.json     what the comparison found
  verdict.json        the last verdict on it
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rlk_align.errors import BadOption, CorruptTrace, ToolError
from rlk_align.results import Comparison
from rlk_align.trace.schema import PassRecord, Record, load_record, save_record, writing

RUNS = Path("rlk-runs")
"""Where runs go by default, below the current directory."""


def fingerprint(*parts: object) -> str:
    """A short stable name for a combination of settings."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class RunRecord(Record):
    """run.json."""

    schema_id: str = "rlk-align/run/1"
    command: list[str]
    """The command line that reproduces it."""
    captures: dict[str, str]
    """Role (`rollout`, `train`, or `capture` for a single one) -> folder below the run."""


class Run:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, name: str) -> "Run":
        """An existing run, by folder or as `@last`. Raises BadOption where there is none."""
        folder = Path(name)
        if name == "@last":
            pointer = RUNS / "last"
            if not pointer.is_file():
                raise BadOption(
                    f"there is no last run below {RUNS.absolute()}", "give the run's folder"
                )
            folder = Path(pointer.read_text(encoding="utf-8").strip())
        if not (folder / "run.json").is_file():
            raise BadOption(
                f"{folder} is no run: run.json is not there",
                "give the folder that `capture -o` or `compare --run-dir` wrote",
            )
        return cls(folder)

    @property
    def record(self) -> RunRecord:
        return load_record(RunRecord, self.folder / "run.json")

    def save(self, record: RunRecord) -> None:
        """Writes run.json and makes this the last run."""
        save_record(record, self.folder / "run.json")
        with writing(RUNS):
            RUNS.mkdir(parents=True, exist_ok=True)
            (RUNS / "last").write_text(f"{self.folder.resolve()}\n", encoding="utf-8")

    def capture_folder(self, role: str) -> Path:
        """The trace of that role, or the only one that the run has."""
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
            raise BadOption(f"{self.folder}/run.json points outside the run: {name}")
        return self.folder / path

    def check_sizes(self) -> None:
        """Raises CorruptTrace where a file of a capture is missing or of another size."""
        for role in self.record.captures:
            folder = self.capture_folder(role)
            if not (folder / "trace.json").is_file():
                raise CorruptTrace(f"the {role} capture {folder} is gone", "compare again")
            for record in folder.glob("*/pass.json"):
                load_record(PassRecord, record).check_sizes(record.parent)

    def relative(self, **folders: Path) -> dict[str, str]:
        """Captures as run.json names them; one that lies elsewhere is linked into the run."""
        captures = {}
        for role, folder in folders.items():
            here, there = self.folder.resolve(), folder.resolve()
            link = self.folder / "captures" / role
            if here not in there.parents:
                with writing(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.unlink(missing_ok=True)
                    link.symlink_to(there, target_is_directory=True)
                there = here / "captures" / role
            captures[role] = there.relative_to(here).as_posix()
        return captures

    @property
    def comparison(self) -> Comparison:
        """Raises BadOption for a run that compared nothing, CorruptTrace for a damaged one."""
        path = self.folder / "comparison.json"
        if not path.exists() and "capture" in self.record.captures:
            raise BadOption(
                f"{self.folder} is a single capture: there is nothing to judge",
                "compare it with another: rlk-align compare RUN_A RUN_B",
            )
        if not path.exists():
            raise CorruptTrace(
                f"{self.folder} holds no comparison: the last compare into it did not finish",
                f"run it again: {' '.join(self.record.command)}",
            )
        return load_record(Comparison, path)

    def invalidate(self) -> None:
        """Takes away what an earlier command concluded: nothing of it may be judged as ours."""
        with writing(self.folder):
            for name in ("comparison.json", "verdict.json"):
                (self.folder / name).unlink(missing_ok=True)

    def save_comparison(self, comparison: Comparison) -> None:
        save_record(comparison, self.folder / "comparison.json")

    def save_verdict(self, verdict: dict) -> None:
        with writing(self.folder):
            text = json.dumps(verdict, indent=1, allow_nan=False)
            (self.folder / "verdict.json").write_text(text + "\n", encoding="utf-8")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Two processes must not capture into one folder at once."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ToolError(
                    f"{self.folder} is in use by another rlk-align",
                    "wait for it, or choose another --run-dir",
                ) from error
            yield
