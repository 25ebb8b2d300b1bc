"""Frozen records on disk: JSON files that are written completely or not at all."""

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
"""The remedy for a file that is damaged or was changed."""


class Record(BaseModel):
    """A frozen record that is stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


R = TypeVar("R", bound=BaseModel)


def save_record(record: BaseModel, path: Path) -> None:
    """Writes a record, completely or not at all."""
    with writing(path), whole_file(path) as partial:
        partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load_record(kind: type[R], path: Path) -> R:
    """Reads a record. Raises CorruptTrace if the file is missing or is not such a record."""
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
    """Raises TraceNotWritten if a write to `path` fails in the context."""
    from pyarrow import ArrowException

    failures: tuple[type[Exception], ...] = (OSError, ArrowException)
    with suppress(ModuleNotFoundError):  # without safetensors no tensors are written
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
    """The remedy for a failed write, by its errno, which may be in the message only."""
    stated = re.search(r"(?:os error|errno:?) (\d+)", str(error), re.IGNORECASE)
    number = getattr(error, "errno", None) or (int(stated[1]) if stated else None)
    if number in FORBIDDEN:
        return "choose a folder that you may write to (--run-dir), or change its permissions"
    return "free some space, choose another --run-dir, or lower --trace-budget"
