"""The formats by name. A new format is a file in this folder and a line in FORMATS."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlk_align.errors import DumpError
from rlk_align.results import SideName

if TYPE_CHECKING:
    from rlk_align.record.imports.source import Source

Read = Callable[[Sequence[Path], SideName], "Source"]
"""(paths, side) -> what the files there have of that side; raises DumpError."""


class Format(NamedTuple):
    """A format of other tools' recordings."""

    read: str
    """The module and the attribute of its reader."""
    files: str
    """How its files are named, as a glob pattern of the end of their paths."""


FORMATS = {
    "sglang-dumper": Format("rlk_align.record.imports.sglang_dumper:read", "step=*___*.pt"),
    "msprobe": Format("rlk_align.record.imports.msprobe:read", "rank*/dump.json"),
    "rl-kernel": Format("rlk_align.record.imports.rl_kernel:read", "capture-manifest.json"),
}


def reader(name: str) -> Read:
    """The reader of a known format."""
    module, _, attribute = FORMATS[name].read.partition(":")
    return getattr(importlib.import_module(module), attribute)


def detect(paths: Sequence[Path]) -> str | None:
    """The format of the recordings at these paths, by the names of their files; None for files of
    no such format. Raises DumpError for several formats."""
    found: dict[str, Path] = {}
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            for name, format in FORMATS.items():
                # Absolute, so that a path may begin anywhere in the pattern.
                if name not in found and file.absolute().match(format.files):
                    found[name] = file
    if len(found) > 1:
        listed = "; ".join(f"{name}: {file}" for name, file in found.items())
        raise DumpError(
            f"{', '.join(map(str, paths))}: files of several formats: {listed}",
            "import each format separately: name it, and its files",
        )
    return next(iter(found), None)
