"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write `path`, which takes its place when the context ends without an error."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    os.replace(partial, path)
