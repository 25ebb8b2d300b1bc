"""The tables and records of a trace, written and read in one place."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlk_align.errors import CorruptTrace, TraceNotWritten
from rlk_align.model.families import ModelShape

ROWS_SCHEMA = pa.schema(
    [
        ("site", pa.string()),
        ("sample", pa.int32()),
        ("position", pa.int32()),
        ("digest_0", pa.int64()),
        ("digest_1", pa.int64()),
        ("norm", pa.float64()),
        ("absmax", pa.float64()),
        ("nonfinite", pa.int64()),
        ("shard", pa.int32()),
        ("index", pa.int64()),
    ]
)
"""norm, absmax and nonfinite are null in digest-only passes; shard and index where no value
is kept."""

WEIGHTS_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("dtype", pa.string()),
        ("digest", pa.string()),
        ("rows", pa.list_(pa.int64())),
        ("columns", pa.list_(pa.int64())),
        ("shards", pa.list_(pa.list_(pa.int64(), 4))),
        ("replicas", pa.list_(pa.string())),
    ]
)
"""rows and columns: a digest of each slice along dimension 0 and 1, so that a mismatch can be
placed; shards: (rank, dimension, start, stop) of what each rank holds; replicas: the digest of
every further rank's own copy."""


class Record(BaseModel):
    """A frozen record that is stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


DtypeName = Literal["bfloat16", "float16", "float32", "float64"]


class SiteRecord(Record):
    """A site of a pass."""

    dtype: DtypeName
    """The engine's own dtype of that site."""
    features: Annotated[int, Field(gt=0)]
    rows: Annotated[int, Field(ge=0)]


class FileRecord(Record):
    """A file as it was written."""

    size: int
    blake2b: str

    @classmethod
    def of_files(cls, folder: Path) -> "dict[str, FileRecord]":
        """Of every file in a folder, by name, as they are now."""
        names = sorted(p.name for p in folder.iterdir())
        return {
            name: cls(size=(folder / name).stat().st_size, blake2b=digest)
            for name, digest in file_digests(folder, names).items()
        }


class WrongRow(Record):
    """A row of layer 0 that is not what its place in the batch asks for."""

    sample: int
    position: int


class WrongPosition(WrongRow):
    """A row that the engine rotated by another position than its own."""

    effective: int


Seen = Literal["other tokens", "itself alone"]


class WrongBoundary(WrongRow):
    """A row whose attention sees other tokens than its sequence lets it."""

    sees: Seen


WRONG_ROWS = 8
"""How many wrong rows a pass names."""

W = TypeVar("W", bound=WrongRow)


class Measured(Record, Generic[W]):
    """What was measured of the rows of layer 0, in one respect."""

    checked: int = 0
    """Rows that could be measured."""
    wrong: int = 0
    first: list[W] = []
    """The first wrong ones, by sample and position."""

    @classmethod
    def of(cls, checked: int, wrong: int, found: Iterable[W]) -> Self:
        """Keeps the first of those that were found."""
        first = sorted(found, key=lambda w: (w.sample, w.position))
        return cls(checked=checked, wrong=wrong, first=first[:WRONG_ROWS])

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Of several parts of a pass."""
        found = (w for p in parts for w in p.first)
        return cls.of(sum(p.checked for p in parts), sum(p.wrong for p in parts), found)


PositionRecord = Measured[WrongPosition]
"""By which positions the engine's rotary embedding rotated."""
BoundaryRecord = Measured[WrongBoundary]
"""Whether sequences begin where they should for the attention."""


class PartRecord(Record):
    """part-N.json: what one process wrote of a pass; gone when the pass is complete."""

    sites: dict[str, SiteRecord]
    positions: PositionRecord
    boundaries: BoundaryRecord
    seconds: float


class PassRecord(Record):
    """pass.json."""

    sites: dict[str, SiteRecord]
    positions: PositionRecord = PositionRecord()
    boundaries: BoundaryRecord = BoundaryRecord()
    unexposed: dict[str, str] = {}
    """Sites that the engine cannot show, each with its reason."""
    files: dict[str, FileRecord]
    """Every other file of the pass."""
    seconds: float
    """Wall time of the engine's work in this pass, taps included, writing the trace excluded
    only where it runs after the pass."""

    def check_sizes(self, folder: Path) -> None:
        """Raises CorruptTrace where a file of the pass is missing or of another size."""
        for name, file in self.files.items():
            path = folder / name
            actual = path.stat().st_size if path.is_file() else None
            if actual != file.size:
                found = "is missing" if actual is None else f"has {actual} bytes, not {file.size}"
                raise CorruptTrace(f"{path} {found}", "capture again with --fresh")

    def check_contents(self, folder: Path) -> None:
        """Raises CorruptTrace where a file of the pass is not the one that was written."""
        self.check_sizes(folder)
        for name, digest in file_digests(folder, list(self.files)).items():
            if digest != self.files[name].blake2b:
                raise CorruptTrace(
                    f"{folder / name} was changed after the capture", "capture again with --fresh"
                )


class TraceRecord(Record):
    """trace.json."""

    schema_id: str = "rlk-align/trace/1"
    engine: str
    version: str
    options: dict[str, Any]
    model: str
    shape: ModelShape
    dtype: str
    """What the engine computed in."""
    environment: dict[str, str]
    attributes: dict[str, Any]
    prompt_ids: dict[str, list[int]]
    """Prompt id -> the ids that this side's own tokenizer gives its text."""


def file_digest(path: Path) -> str:
    """BLAKE2b of a file's bytes; raises CorruptTrace where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    except OSError as error:
        raise CorruptTrace(f"{path} cannot be read: {error}") from error


def file_digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Of several files at once: hashing leaves the interpreter to other threads."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda n: file_digest(folder / n), names), strict=True))


R = TypeVar("R", bound=BaseModel)


def save_record(record: BaseModel, path: Path) -> None:
    """Writes a record so that a reader sees all of it or nothing."""
    with writing(path):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def load_record(kind: type[R], path: Path) -> R:
    """Raises CorruptTrace where the file is missing or not such a record."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorruptTrace(f"{path} is missing", "capture again with --fresh") from error
    except (OSError, UnicodeDecodeError, ValidationError, json.JSONDecodeError) as error:
        raise CorruptTrace(f"{path} is not readable as {kind.__name__}: {error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write below `path` into TraceNotWritten."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, pa.ArrowException) as error:
        raise TraceNotWritten(
            f"the trace could not be written to {path}: {error}",
            "free some space, choose another --run-dir, or lower --trace-budget; "
            "finished passes are kept, and a rerun goes on from there",
        ) from error
