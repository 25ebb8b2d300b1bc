"""The readers by name. A new reader is a file in this folder and a line in READERS.

Other packages add readers through the entry-point group `rlk_align.readers`; an entry point names
a Reader.
"""

import importlib
import importlib.metadata
import re
from pathlib import Path

from rlk_align.errors import BadOption, DumpError
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.files import LONGEST, not_utf8, opened

READERS = {
    "nemo-rl": "rlk_align.logs.readers.nemo_rl:READER",
    "prime-rl": "rlk_align.logs.readers.prime_rl:READER",
    "slime": "rlk_align.logs.readers.slime:READER",
    "miles": "rlk_align.logs.readers.miles:READER",
    "jsonl": "rlk_align.logs.readers.jsonl:READER",
}
"""Name -> the module and the attribute of its Reader."""
AUTO = "auto"
TEXTS = (".jsonl", ".json", ".ndjson")
_SHOWN = 3
"""The number of files of a format that a message names."""
_GROUP = "rlk_align.readers"


def names() -> list[str]:
    """Returns the names of all readers."""
    return sorted({*READERS, *importlib.metadata.entry_points(group=_GROUP).names})


def reader(name: str) -> Reader:
    """Returns a reader. Raises BadOption, with the known names, for an unknown one."""
    if name in READERS:
        module, _, attribute = READERS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    plugins = importlib.metadata.entry_points(group=_GROUP)
    if name in plugins.names:
        return plugins[name].load()
    raise BadOption(f"format {name!r} is unknown", f"choose from {', '.join((AUTO, *names()))}")


def files_of(chosen: Reader, paths: list[Path]) -> list[Path]:
    """Returns the files that a reader finds. Raises DumpError for a path without such a file."""
    all_files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist", "check the path")
        files = chosen.files(path)
        if not files:
            wanted = " or ".join(chosen.patterns)
            raise DumpError(
                f"{path} has no {wanted}, the format of {chosen.name}", "check the path"
            )
        all_files |= dict.fromkeys(files)
    return list(all_files)


def detect(paths: list[Path]) -> Reader:
    """Returns the reader for the files at these paths, by their content. Raises DumpError if no
    file has a known format, or if there are several formats."""
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist", "check the path")
    by_format, unknown = _by_format(paths)
    if len(by_format) > 1:
        listed = "; ".join(f"{chosen}: {_some(files)}" for chosen, files in by_format.items())
        raise DumpError(
            f"{', '.join(map(str, paths))}: files of several formats: {listed}",
            "import each format separately: name it, its files and a run",
        )
    if not by_format:
        for path in paths:
            if path.is_file():
                opened(path, Findings())
                _check_encoding(path)
        in_folders = [file for file in unknown if file not in paths]
        looked = f" (looked at {_some(in_folders)})" if in_folders else ""
        raise DumpError(
            f"{', '.join(map(str, paths))}: no known format{looked}",
            f"name one of {', '.join(names())}",
        )
    return reader(next(iter(by_format)))


def _check_encoding(path: Path) -> None:
    """Raises DumpError if a file of lines is not in UTF-8."""
    with path.open("rb") as file:
        why = not_utf8(file.readline(LONGEST)) if path.suffix in TEXTS else None
    if why is not None:
        raise DumpError(f"{path}: {why}", "write it in UTF-8")


def recognised_files(chosen: Reader, paths: list[Path], findings: Findings) -> list[Path]:
    """Returns the files at these paths with the format of a detected reader. Files without a known
    format are recorded as skipped."""
    by_format, unknown = _by_format(paths)
    for file in unknown:
        findings.skip(f"{file}: no known format")
    return by_format[chosen.name]


def _by_format(paths: list[Path]) -> tuple[dict[str, list[Path]], list[Path]]:
    """Returns format -> its files at these paths, and the files without a known format. Of files
    whose names differ only in numbers, such as those of steps and ranks, one is recognised."""
    readers = [reader(name) for name in dict.fromkeys((*READERS, *sorted(names())))]
    alike: dict[str, list[Path]] = {}
    for file in dict.fromkeys(f for path in paths for r in readers for f in r.files(path)):
        alike.setdefault(re.sub(r"\d+", "#", str(file)), []).append(file)
    by_format: dict[str, list[Path]] = {}
    unknown: list[Path] = []
    for files in alike.values():
        name = next((r.name for file in files for r in readers if r.recognises(file)), None)
        (unknown if name is None else by_format.setdefault(name, [])).extend(files)
    return by_format, unknown


def _some(files: list[Path]) -> str:
    shown = ", ".join(map(str, files[:_SHOWN]))
    return f"{shown} and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else shown
