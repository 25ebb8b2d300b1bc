"""Writes files completely or not at all, and reads text files as people save them."""

import codecs
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to; it becomes `path` when the context ends without an error."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    os.replace(partial, path)


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, without a byte-order mark, with each line end as `\\n`.

    Raises OSError, or ValueError where the file is not UTF-8.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        reason = "it begins like UTF-16" if utf16 else str(error)
        raise ValueError(f"not UTF-8: {reason}; save it as UTF-8") from error
    if "\0" in text:
        raise ValueError("it holds NUL characters, like UTF-16; save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
