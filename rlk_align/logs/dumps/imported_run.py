"""The run that `rlk-align import` writes.

RUN/
  run.json          the command, and that this is an imported run
  dump.json         the files that were read, and their content (`rlk_align.logs.dumps.manifest`)
  logprobs.parquet  a row for each sequence (`rlk_align.logs.dumps.table`)
  checksums.json    of all these files; it is written last, so a run with it is complete
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Literal

import pyarrow as pa

from rlk_align.errors import BadOption, CorruptTrace, DumpError
from rlk_align.logs.dumps.manifest import Findings, Manifest, Tally
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.dumps.table import read_steps, read_table, write_table
from rlk_align.trace.checksums import CHECKSUMS, add_checksums
from rlk_align.trace.records import Record, load_record, save_record, writing
from rlk_align.trace.run import IMPORTED
from rlk_align.trace.run_folder import RUN_JSON, RunFolder, find_run, schema_of

MANIFEST, TABLE = "dump.json", "logprobs.parquet"


class ImportRecord(Record):
    """run.json of an imported run."""

    schema_id: Literal["rlk-align/imported-run/1"] = IMPORTED
    command: list[str]
    """The command line that reproduces it."""
    failed: str | None = None
    """Why the dump could not be read; the folder then has no run."""


class ImportedRun(RunFolder):
    """The folder of an imported run."""

    files = (RUN_JSON, MANIFEST, TABLE, CHECKSUMS)

    @classmethod
    def open(cls, name: str) -> "ImportedRun":
        """Returns a finished run, by folder or as `@last`. Raises BadOption if there is no run, or
        if engines made it, and CorruptTrace if it is incomplete or was changed."""
        run = cls(find_run(name))
        schema = schema_of(run.folder)
        if schema is not None and schema.startswith("rlk-align/run/"):
            raise BadOption(
                f"{run.folder} is a run of engines, not an imported dump",
                "rlk-align import FORMAT PATH... -o RUN imports a framework's dump",
            )
        with run._import_again():
            run._check_whole("it was interrupted, or another command is still writing it")
            run._checksums.check(run.folder, [MANIFEST])
        return run

    @property
    def record(self) -> ImportRecord:
        return load_record(ImportRecord, self.folder / RUN_JSON)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest. Raises CorruptTrace if it is damaged."""
        with self._import_again():
            return load_record(Manifest, self.folder / MANIFEST)

    def sequences(self) -> Iterator[Sequences]:
        """Yields all sequences, in batches that fit into memory. Raises CorruptTrace if the table
        was changed."""
        with self._import_again():
            self._checksums.check(self.folder, [TABLE])
        yield from read_table(self.folder / TABLE)

    def steps(self) -> Iterator[tuple[int, Iterator[Sequences]]]:
        """Yields each training step, in order, with its sequences. Raises CorruptTrace if the table
        was changed."""
        with self._import_again():
            self._checksums.check(self.folder, [TABLE])
        yield from read_steps(self.folder / TABLE)

    def write(
        self,
        batches: Iterable[pa.RecordBatch],
        findings: Findings,
        *,
        command: list[str],
        format: str,
        framework: str | None = None,
    ) -> Manifest:
        """Replaces the run by batches of `table.SCHEMA`, and makes it the last run.

        The reader fills `findings` while it yields the batches. Raises BadOption if the folder has
        another kind of run. Raises DumpError if the dump cannot be read or has no sequence; the
        folder then records the reason.
        """
        if (self.folder / RUN_JSON).is_file() and schema_of(self.folder) != IMPORTED:
            raise BadOption(f"{self.folder} has another run", "name another folder with -o")
        with self.locked():
            self._discard()
            try:
                manifest = self._write(batches, findings, command, format, framework)
            except DumpError as error:
                self._discard()
                failed = ImportRecord(command=command, failed=str(error))
                save_record(failed, self.folder / RUN_JSON)
                raise
            self._remember()
        return manifest

    def _write(
        self,
        batches: Iterable[pa.RecordBatch],
        findings: Findings,
        command: list[str],
        format: str,
        framework: str | None,
    ) -> Manifest:
        save_record(ImportRecord(command=command), self.folder / RUN_JSON)
        tally = Tally()
        with writing(self.folder / TABLE):
            write_table(tally.counting(batches), self.folder / TABLE)
        if not tally.counts["sequences"]:
            raise DumpError("the dump has no sequence", "; ".join(findings.skipped))
        manifest = tally.manifest(format, framework, findings)
        save_record(manifest, self.folder / MANIFEST)
        add_checksums(self.folder, (RUN_JSON, MANIFEST, TABLE))
        return manifest

    def _discard(self) -> None:
        with writing(self.folder):
            for name in self.files:
                (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def _import_again(self) -> Iterator[None]:
        """Adds to the error of a damaged run the command that imported it."""
        try:
            yield
        except CorruptTrace as error:
            command, failed = "rlk-align import FORMAT PATH... -o RUN", None
            with suppress(CorruptTrace):
                command, failed = shlex.join(self.record.command), self.record.failed
            fix = f"import it again: {command}"
            if failed is not None:
                # An import of the same files would fail again.
                fix = f"the import failed: {failed}. Repair or omit that file, then: {command}"
            raise CorruptTrace(error.message, fix) from error
