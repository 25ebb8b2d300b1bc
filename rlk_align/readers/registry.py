"""The readers by name. To add one: its file here, and a line in READERS.

Third parties add readers through the entry-point group `rlk_align.readers`; the entry point names a
Reader.
"""

import importlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from rlk_align.dumps.manifest import Findings
from rlk_align.errors import BadOption, DumpError
from rlk_align.readers.base import Reader
from rlk_align.readers.files import opened

READERS = {
    "nemo-rl": "rlk_align.readers.nemo_rl:READER",
    "prime-rl": "rlk_align.readers.prime_rl:READER",
    "slime": "rlk_align.readers.slime:READER",
    "miles": "rlk_align.readers.miles:READER",
    "jsonl": "rlk_align.readers.jsonl:READER",
}
"""Name -> where its Reader stands."""
AUTO = "auto"
_GROUP = "rlk_align.readers"


def names() -> list[str]:
    """Returns the names of all readers."""
    return sorted({*READERS, *importlib.metadata.entry_points(group=_GROUP).names})


def reader(name: str) -> Reader:
    """Raises BadOption, naming the ones that exist."""
    if name in READERS:
        module, _, attribute = READERS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    plugins = importlib.metadata.entry_points(group=_GROUP)
    if name in plugins.names:
        return plugins[name].load()
    raise BadOption(f"format {name!r} is unknown", f"choose from {', '.join((AUTO, *names()))}")


def files_of(chosen: Reader, paths: list[Path]) -> list[Path]:
    """Returns the files that a reader finds at these paths; raises DumpError for a path without."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist", "check the path")
        files = chosen.files(path)
        if not files:
            wanted = " or ".join(chosen.patterns)
            raise DumpError(
                f"{path} holds no {wanted}, the format of {chosen.name}", "check the path"
            )
        found |= dict.fromkeys(files)
    return list(found)


def detect(paths: list[Path]) -> Reader:
    """Returns the reader whose format the files at these paths are, by content. Raises DumpError
    where there is none."""
    for path in paths:
        if not path.exists():
            raise DumpError(f"{path} does not exist", "check the path")
    for chosen in map(reader, (*READERS, *(set(names()) - set(READERS)))):
        files = list(_all_files(chosen, paths))
        if files and chosen.recognises(files[0]):
            return chosen
    for path in paths:
        if path.is_file():
            opened(path, Findings())
    raise DumpError(
        f"{', '.join(map(str, paths))}: no known format", f"name one of {', '.join(names())}"
    )


def _all_files(chosen: Reader, paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from chosen.files(path)
