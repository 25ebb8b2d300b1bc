"""Frozen records on disk, each a JSON file that is there whole or not at all."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlk_align.errors import CorruptTrace, TraceNotWritten
from rlk_align.files import whole_file
from rlk_align.text import complaint

REPAIR = "run the command that wrote it again, with --fresh"
"""What helps against a file that is not what was written."""


class Record(BaseModel):
    """A frozen record that is stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


R = TypeVar("R", bound=BaseModel)


def save_record(record: BaseModel, path: Path) -> None:
    """Writes a record so that a reader sees all of it or nothing."""
    with writing(path), whole_file(path) as partial:
        partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load_record(kind: type[R], path: Path) -> R:
    """Raises CorruptTrace where the file is missing or not such a record."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorruptTrace(f"{path} is missing", REPAIR) from error
    except ValidationError as error:
        raise CorruptTrace(f"{path} is damaged: {complaint(error)}", REPAIR) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptTrace(f"{path} cannot be read: {error}", REPAIR) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write below `path` into TraceNotWritten."""
    from pyarrow import ArrowException

    failures: tuple[type[Exception], ...] = (OSError, ArrowException)
    with suppress(ModuleNotFoundError):  # without it no tensors are written
        from safetensors import SafetensorError

        failures += (SafetensorError,)
    try:
        yield
    except failures as error:
        raise TraceNotWritten(
            f"the trace could not be written to {path}: {error}",
            f"{_remedy(error)}; finished passes are kept, and a rerun continues from there",
        ) from error


FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def _remedy(error: Exception) -> str:
    """What helps against a failed write, by the system's number for it, which some libraries give
    in their message alone."""
    told = re.search(r"(?:os error|errno:?) (\d+)", str(error), re.IGNORECASE)
    number = getattr(error, "errno", None) or (int(told[1]) if told else None)
    if number in FORBIDDEN:
        return "choose a folder that you may write to (--run-dir), or get the right to write there"
    return "free some space, choose another --run-dir, or lower --trace-budget"
