"""The formats by name. A new format is a file in this folder and a line in FORMATS."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_align.results import SideName

if TYPE_CHECKING:
    from rlk_align.record.imports.source import Source

Read = Callable[[Sequence[Path], SideName], "Source"]
"""(paths, side) -> what the files there have of that side; raises DumpError."""

FORMATS = {
    "sglang-dumper": "rlk_align.record.imports.sglang_dumper:read",
    "msprobe": "rlk_align.record.imports.msprobe:read",
    "rl-kernel": "rlk_align.record.imports.rl_kernel:read",
}
"""Name -> the module and the attribute of its reader."""


def reader(name: str) -> Read:
    """The reader of a known format."""
    module, _, attribute = FORMATS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
