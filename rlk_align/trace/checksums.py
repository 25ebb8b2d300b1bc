"""checksums.json: the checksums of a folder's files.

A file is compared with its checksum before it is read. That detects accidents, but not a forger,
who can also write this file: `gate --recompute` derives the comparison again.

A capture's checksums.json lists its records, its tables and the pass.json of each finished pass,
which lists the files of that pass. A run's checksums.json lists its records and the checksums.json
of each capture.
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
    """The size and digest of a file."""

    size: Annotated[int, Field(ge=0)]
    blake2b: str

    @classmethod
    def of_files(cls, folder: Path, names: Iterable[str]) -> "dict[str, FileRecord]":
        """The records of these files."""
        return {
            name: cls(size=(folder / name).stat().st_size, blake2b=digest)
            for name, digest in _digests(folder, list(names)).items()
        }


class Checksums(Record):
    """checksums.json."""

    schema_id: Literal["rlk-align/checksums/1"] = "rlk-align/checksums/1"
    files: dict[str, FileRecord]
    """Path below the folder -> the file's record."""

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Raises CorruptTrace if one of these files is not listed, is missing, or was changed."""
        wanted = list(names)
        for name in wanted:
            if name not in self.files:
                raise CorruptTrace(f"{folder / CHECKSUMS} does not list {name}", REPAIR)
        check_files(folder, {name: self.files[name] for name in wanted})


def read_checksums(folder: Path) -> Checksums:
    """The checksums of a folder. Raises CorruptTrace if it has none."""
    return load_record(Checksums, folder / CHECKSUMS)


def add_checksums(folder: Path, names: Iterable[str]) -> None:
    """Adds or replaces the records of these files."""
    known = read_checksums(folder).files if (folder / CHECKSUMS).is_file() else {}
    now = FileRecord.of_files(folder, names)
    save_record(Checksums(files=known | now), folder / CHECKSUMS)


def check_sizes(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises CorruptTrace if a file is missing or has another size."""
    for name, file in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != file.size:
            problem = "is missing" if actual is None else f"has {actual} bytes, not {file.size}"
            raise CorruptTrace(f"{path} {problem}", REPAIR)


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises CorruptTrace if a file is missing or was changed."""
    check_sizes(folder, files)
    for name, digest in _digests(folder, list(files)).items():
        if digest != files[name].blake2b:
            raise CorruptTrace(f"{folder / name} was changed after it was written", REPAIR)


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Name -> digest; files are hashed in parallel, because hashing releases the interpreter."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda n: _digest(folder / n), names), strict=True))


def _digest(path: Path) -> str:
    """The BLAKE2b digest of a file. Raises CorruptTrace if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    except OSError as error:
        raise CorruptTrace(f"{path} cannot be read: {error}") from error
