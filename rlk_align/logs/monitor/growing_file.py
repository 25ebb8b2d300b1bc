"""A text file to which a program appends lines."""

from collections.abc import Iterator
from pathlib import Path

from rlk_align.errors import DumpError
from rlk_align.logs.readers.files import BOM, not_utf8


class GrowingFile:
    """Yields each line once, when it is complete. A file that has become shorter, because it was
    written again from its start, is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = self._number = 0

    def lines(self, ended: bool) -> Iterator[tuple[str, bytes]]:
        """Yields (where, line) for each new line. If the file has `ended`, this includes a last
        line without a line break that is a whole JSON object. Raises DumpError."""
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
