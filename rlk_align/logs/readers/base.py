"""The interface of a reader of a framework's dumps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A format of dumps."""

    name: str
    """Its name on the command line."""
    framework: str | None
    """The framework that writes it; None if several do."""
    patterns: tuple[str, ...]
    """The names of its files in a folder, as glob patterns."""
    recognises: Callable[[Path], bool]
    """Whether a file is of this format, by its content."""
    read: Callable[[list[Path], Findings, Progress], Iterator[Row]]
    """Yields the sequences of these files; raises DumpError if they cannot be read."""

    def files(self, path: Path) -> list[Path]:
        """Returns the files that the reader would read at `path`, a file or a folder."""
        if not path.is_dir():
            return [path]
        # Absolute paths are matched, so that `train_data/*.pt` matches if `path` is `train_data`.
        below = ((file, file.absolute()) for file in path.rglob("*"))
        return sorted(f for f, full in below if any(map(full.match, self.patterns)))
