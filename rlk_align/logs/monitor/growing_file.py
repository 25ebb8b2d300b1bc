"""A text file to which another program appends lines."""

from collections.abc import Iterator
from pathlib import Path

from rlk_align.errors import DumpError
from rlk_align.logs.readers.files import BOM, not_utf8


class GrowingFile:
    """Reads each line once, when it is complete. It is an error if the file becomes shorter,
    because it was then written again from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = self._number = 0

    def lines(self, ended: bool) -> Iterator[tuple[str, bytes]]:
        """Yields (path and line number, line) for each new line. If the file has `ended`, a last
        line without a line break counts if it is a whole JSON object. Raises DumpError."""
        try:
            if self.path.stat().st_size < self._read:
                raise DumpError(f"{self.path} has become shorter", "restart the monitor")
            with self.path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    whole = line.endswith(b"\n") or (ended and line.rstrip().endswith(b"}"))
                    if not whole and not (ended and b"\0" in line):
                        return
                    self._read += len(line)
                    self._number += 1
                    if line.strip():
                        where = f"{self.path}, line {self._number}"
                        line = line.removeprefix(BOM) if self._number == 1 else line
                        if (why := not_utf8(line)) is not None:
                            raise DumpError(f"{where}: {why}", "write it in UTF-8")
                        yield where, line
        except OSError as error:
            raise DumpError(f"{self.path} cannot be read: {error.strerror}") from error
