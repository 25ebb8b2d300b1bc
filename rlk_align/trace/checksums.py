"""checksums.json: what the files of a folder were when they were written.

A file is compared with its checksum before it is read. That guards against accidents and
carelessness, not against a forger, who can write this file too: `gate --recompute` derives the
comparison again.

A capture's checksums.json names its records and tables and the pass.json of each finished pass,
which names the pass's own files; a run's names its records and each capture's checksums.json.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlk_align.errors import CorruptTrace
from rlk_align.trace.records import REPAIR, Record, load_record, save_record

CHECKSUMS = "checksums.json"


class FileRecord(Record):
    """A file as it was written."""

    size: Annotated[int, Field(ge=0)]
    blake2b: str

    @classmethod
    def of_files(cls, folder: Path, names: Iterable[str]) -> "dict[str, FileRecord]":
        """Records these files as they are now."""
        return {
            name: cls(size=(folder / name).stat().st_size, blake2b=digest)
            for name, digest in _digests(folder, list(names)).items()
        }


class Checksums(Record):
    """checksums.json."""

    schema_id: Literal["rlk-align/checksums/1"] = "rlk-align/checksums/1"
    files: dict[str, FileRecord]
    """Path below the folder -> the file."""

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Raises CorruptTrace where one of these files is not named here, is missing, or is not
        the one that was written."""
        wanted = list(names)
        for name in wanted:
            if name not in self.files:
                raise CorruptTrace(f"{folder / CHECKSUMS} does not name {name}", REPAIR)
        check_files(folder, {name: self.files[name] for name in wanted})


def read_checksums(folder: Path) -> Checksums:
    """Raises CorruptTrace where the folder has none."""
    return load_record(Checksums, folder / CHECKSUMS)


def add_checksums(folder: Path, names: Iterable[str]) -> None:
    """Records these files as they are now; what was recorded of others stays."""
    known = read_checksums(folder).files if (folder / CHECKSUMS).is_file() else {}
    now = FileRecord.of_files(folder, names)
    save_record(Checksums(files=known | now), folder / CHECKSUMS)


def check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises CorruptTrace where a file is missing or of another size."""
    for name, file in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != file.size:
            problem = "is missing" if actual is None else f"has {actual} bytes, not {file.size}"
            raise CorruptTrace(f"{path} {problem}", REPAIR)


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises CorruptTrace where a file is missing or is not the one that was written."""
    check_sizes(folder, files)
    for name, digest in _digests(folder, list(files)).items():
        if digest != files[name].blake2b:
            raise CorruptTrace(f"{folder / name} was changed after it was written", REPAIR)


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Hashes several files at once: hashing leaves the interpreter to other threads."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda n: _digest(folder / n), names), strict=True))


def _digest(path: Path) -> str:
    """BLAKE2b of a file's bytes; raises CorruptTrace where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    except OSError as error:
        raise CorruptTrace(f"{path} cannot be read: {error}") from error
