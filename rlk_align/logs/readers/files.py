"""The files of a dump: opens them, refuses pickles, and reads lines."""

import codecs
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings, SourceFile
from rlk_align.logs.readers.values import WrongValue
from rlk_align.progress import Progress
from rlk_align.text import short_printable

PICKLES = (".pkl", ".pickle", ".dp")
GZIP = b"\x1f\x8b"
BOM = codecs.BOM_UTF8
"""Some programs write it before a text in UTF-8, but it is not part of the text."""
LONGEST = 1 << 28
"""The largest number of bytes in a line."""
CONVERTER = (
    "a pickle runs code when it is loaded, so rlk-align never loads one. If you trust the file, "
    "convert it to the neutral file in the environment of the framework that wrote it: "
    "docs/import.md has the command for SkyRL, verl and others. "
    "Then: rlk-align import jsonl FILE.jsonl -o RUN"
)


def opened(path: Path, findings: Findings) -> SourceFile:
    """Adds a file to the sources. Raises DumpError if it is empty, compressed or a pickle."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}", "check the path") from error
    if path.suffix in PICKLES or (head[:1] == b"\x80" and head[1:] < b"\x10"):
        raise DumpError(f"{path} is a pickle", CONVERTER)
    if head == GZIP:
        raise DumpError(f"{path} is compressed with gzip", "decompress it first: gunzip FILE")
    if not size:
        raise DumpError(f"{path} is empty", "the framework wrote nothing there: see its log")
    source = SourceFile(path=str(path), size=size)
    findings.sources.append(source)
    return source


def read_lines(
    path: Path, findings: Findings, progress: Progress, row: Callable[[bytes, int], Row]
) -> Iterator[Row]:
    """Yields `row(line, number)` for each line.

    A truncated last line is recorded as skipped. Raises DumpError, with the number of the line, if
    `row` raises WrongValue or another ValueError, or if the line is longer than LONGEST.
    """
    size = opened(path, findings).size
    done = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
            if len(line) > LONGEST:
                raise DumpError(
                    f"{path}, line {number}: longer than {LONGEST >> 20} MB",
                    "check that it holds one sequence a line",
                )
            if not line.strip():
                done += len(line)
                continue
            progress(f"reading {path.name}", done >> 20, size >> 20)
            try:
                made = row(line.removeprefix(BOM) if number == 1 else line, number)
            except (ValueError, OverflowError, RecursionError) as error:
                if not line.endswith(b"\n") and not _is_json(line) and not_utf8(line) is None:
                    findings.skip(f"{path}: line {number}, the last, is cut off")
                    return
                where = f"{path}, line {number}"
                why = not_utf8(line) or _reason(error)
                raise DumpError(f"{where}: {why}", "see docs/import.md") from error
            yield made
            done += len(line)


def json_object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line. Raises ValueError if the line is something else."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise WrongValue("the line is not a JSON object")
    return value


def first_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object of the first line; empty if the line is something else."""
    try:
        with path.open("rb") as file:
            lines = iter(partial(file.readline, LONGEST), b"")
            return json_object(
                next((line for line in lines if line.strip()), b"").removeprefix(BOM)
            )
    except (OSError, ValueError, RecursionError):
        return {}


def require(record: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raises WrongValue if a field is absent."""
    absent = [name for name in names if name not in record]
    if absent:
        raise WrongValue(f"{', '.join(absent)}: missing")


def not_utf8(line: bytes) -> str | None:
    """Returns why a line is not UTF-8; None if it is."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
            return "its encoding is UTF-16 or UTF-32, not UTF-8"
        return (
            f"its encoding is not UTF-8 (byte {error.start + 1} of the line is "
            f"{line[error.start]:#04x}), but a legacy one such as Latin-1, or it is damaged"
        )
    return "its encoding is UTF-16 or UTF-32, not UTF-8" if b"\0" in line else None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, WrongValue):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos}"
    return short_printable(error)
