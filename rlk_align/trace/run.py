"""The RUN folder: one layout for capture, compare, gate and report.

RUN/
  run.json            the command, and the folders of the captures
  tokens.parquet      the tokens that were scored, if the run was compared by --modules
  prompts.jsonl       the prompts that engines read, unless they are a file of the user's
  captures/NAME/      a Trace each, named after a digest of everything that affects its contents
  comparison.json     the result of the comparison
  comparison.parquet  the same, row by row
  verdict.json        the verdict
  probe.json          the side that introduced each difference, if the run was probed
  checksums.json      of all these files; written last, so its presence means complete
"""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from rlk_align.errors import BadOption, CorruptTrace
from rlk_align.results import Comparison, EdgeName, Kind
from rlk_align.trace.checksums import CHECKSUMS, add_checksums
from rlk_align.trace.records import REPAIR, Record, load_record, save_record, writing
from rlk_align.trace.run_folder import RUN_JSON, RunFolder, find_run, schema_of
from rlk_align.trace.schema import check_trace

if TYPE_CHECKING:
    import pyarrow as pa

PROBE = "probe.json"
RUN_PROMPTS = "prompts.jsonl"
ROWS = "comparison.parquet"
CONCLUSIONS = ("comparison.json", ROWS, "verdict.json")
RUN_FILES = (RUN_JSON, RUN_PROMPTS, "tokens.parquet", *CONCLUSIONS, PROBE, CHECKSUMS)
R = TypeVar("R", bound=BaseModel)
IMPORTED: Literal["rlk-align/imported-run/1"] = "rlk-align/imported-run/1"
"""The schema in run.json of a run that `rlk-align import` wrote."""


def is_imported(name: str) -> bool:
    """Whether a run, a folder or `@last`, was imported. Raises BadOption if there is no run."""
    return schema_of(find_run(name)) == IMPORTED


def fingerprint(*parts: object) -> str:
    """A short stable name for a combination of settings."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


Role = Literal["rollout", "train", "capture"]
"""The role of a capture in a run; `capture` is the only one of a run that compares nothing."""


class RunRecord(Record):
    """run.json."""

    schema_id: Literal["rlk-align/run/2"] = "rlk-align/run/2"
    command: list[str]
    """The command line that reproduces the run."""
    captures: Annotated[dict[Role, str], Field(min_length=1)]
    """The folders of the captures, below the run."""
    judged: tuple[EdgeName, ...] = ()
    """The edges that a contract judges."""
    allowed: tuple[Kind, ...] = ()
    """The mismatches that the user allowed."""


class ModulesRecord(Record):
    """run.json of a run that was compared module by module."""

    schema_id: Literal["rlk-align/modules-run/1"] = "rlk-align/modules-run/1"
    command: list[str]
    captures: dict[Role, str]


class Run(RunFolder):
    """A run's folder."""

    files = RUN_FILES

    @classmethod
    def open(cls, name: str) -> "Run":
        """A finished run, by folder or as `@last`. Raises BadOption if there is no such run or it
        was imported, CorruptTrace if it did not finish or run.json was changed."""
        run = cls(find_run(name))
        if schema_of(run.folder) == IMPORTED:
            named = shlex.quote(str(run.folder))
            raise BadOption(
                f"{run.folder} has imported log-probs of both sides, and neither captures nor a "
                "comparison",
                f"rlk-align explain {named} compares its two sides, and rlk-align report html "
                f"{named} draws them; rlk-align compare --tokens {named} --train SPEC scores its "
                "ids again",
            )
        if schema_of(run.folder) == ModulesRecord.model_fields["schema_id"].default:
            raise BadOption(
                f"{run.folder} was compared by --modules: no contract names its modules",
                f"its verdict is in {shlex.quote(str(run.folder / 'verdict.json'))}",
            )
        run._check_whole(f"repeat this run: {shlex.join(run.record.command)}")
        return run

    @property
    def record(self) -> RunRecord:
        return load_record(RunRecord, self.folder / "run.json")

    def save(self, record: RunRecord | ModulesRecord) -> None:
        """Writes run.json and makes this the last run."""
        save_record(record, self.folder / "run.json")
        self._remember()

    def finish(self) -> None:
        """Writes the checksums of all files; from then on the run may be read."""
        record = self.record
        conclusions = CONCLUSIONS if record.judged else ()
        captures = [f"{folder}/{CHECKSUMS}" for folder in record.captures.values()]
        probe = [PROBE] if (self.folder / PROBE).is_file() else []
        add_checksums(self.folder, ["run.json", *conclusions, *probe, *captures])

    def capture_folder(self, role: Role) -> Path:
        """The folder of the trace with that role, or of the run's only trace. Raises BadOption if
        there is none, CorruptTrace if it is not the one with which the run was finished."""
        captures = self.record.captures
        name = captures.get(role)
        if name is None and len(captures) == 1:
            name = next(iter(captures.values()))
        if name is None:
            raise BadOption(
                f"{self.folder} has no {role} capture", f"it has: {', '.join(captures)}"
            )
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CorruptTrace(f"{self.folder}/run.json points outside the run: {name}", REPAIR)
        try:
            self._checksums.check(self.folder, [f"{name}/{CHECKSUMS}"])
        except CorruptTrace as error:
            where = (self.folder / path).resolve()
            raise CorruptTrace(
                f"{self.folder}: its {role} capture, {where}, is gone or was replaced: "
                f"{error.message}",
                f"repeat this run: {shlex.join(self.record.command)}",
            ) from error
        return self.folder / path

    def check(self) -> None:
        """Raises CorruptTrace if a file of the run is missing or was changed.

        A copied run may lack all files of a capture except its checksums.json, because its
        conclusions do not need the values.
        """
        for role in self.record.captures:
            folder = self.capture_folder(role)
            if any(path.name != CHECKSUMS for path in folder.iterdir()):
                check_trace(folder)
        self._checksums.check(self.folder, self._checksums.files)

    def relative(self, folders: Mapping[Role, Path]) -> dict[Role, str]:
        """The captures as run.json names them. A capture outside the run is linked into it, so that
        both may be moved together."""
        captures: dict[Role, str] = {}
        for role, folder in folders.items():
            here, there = self.folder.resolve(), folder.resolve()
            link = self.folder / "captures" / role
            if here not in there.parents:
                if link.is_dir() and not link.is_symlink():
                    # A copy of the run replaced the link by a folder, which must stay.
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
        """The result of a probe, if the run was probed. Raises CorruptTrace if it is damaged."""
        if PROBE not in self._checksums.files:
            return None
        self._checksums.check(self.folder, [PROBE])
        return load_record(kind, self.folder / PROBE)

    def save_probe(self, probe: BaseModel) -> None:
        """Writes the result of a probe; the run has to be finished again afterwards."""
        with writing(self.folder):
            (self.folder / CHECKSUMS).unlink(missing_ok=True)
        save_record(probe, self.folder / PROBE)

    def invalidate(self) -> None:
        """Deletes the conclusions of an earlier command, so that they are not judged again."""
        with writing(self.folder):
            for name in (CHECKSUMS, *CONCLUSIONS, PROBE):
                (self.folder / name).unlink(missing_ok=True)

    def save_comparison(self, comparison: Comparison, rows: "pa.Table") -> None:
        from rlk_align.comparison_table import save_rows

        save_record(comparison, self.folder / "comparison.json")
        with writing(self.folder / ROWS):
            save_rows(rows, self.folder / ROWS)

    @property
    def has_rows(self) -> bool:
        """Whether the run has its comparison row by row, which older runs lack."""
        return ROWS in self._checksums.files

    def rows(self, columns: Sequence[str] | None = None) -> "pa.Table":
        """The rows of the comparison, or only these columns (see `rlk_align.comparison_table`).
        Raises CorruptTrace for a damaged table."""
        from rlk_align.comparison_table import load_rows

        self._checksums.check(self.folder, [ROWS])
        return load_rows(self.folder / ROWS, columns)

    def save_verdict(self, verdict: dict) -> None:
        with writing(self.folder):
            text = json.dumps(verdict, indent=1, allow_nan=False)
            (self.folder / "verdict.json").write_text(text + "\n", encoding="utf-8")
