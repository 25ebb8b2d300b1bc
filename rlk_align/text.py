"""Makes foreign text safe to print: names, paths, and messages of engines and patches."""

from pydantic import ValidationError
from rich.text import Text


def printable(text: object, lines: bool = False) -> str:
    """Returns `text` with escapes for everything that a terminal would interpret or not show.

    Control characters, bidirectional overrides, zero-width characters and lone surrogates become
    `\\x1b`, `\\u202e` ...; `lines` keeps line breaks and tabs.
    """
    allowed = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def line(text: object = "", style: str = "") -> Text:
    """Returns a line for the terminal: printable, and never interpreted as markup."""
    return Text(printable(text), style=style)


def complaint(error: ValidationError) -> str:
    """Returns the first error as `where: what`, or the names of all missing fields."""
    errors = error.errors(include_url=False)
    missing = [".".join(map(str, e["loc"])) for e in errors if e["type"] == "missing"]
    if len(missing) > 1:
        return f"{len(missing)} required fields are missing: {', '.join(missing)}"
    first = errors[0]
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


_LONGEST = 300


def one_line(error: BaseException) -> str:
    """Returns the message of another package's error, in a line of at most 300 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."


def short_printable(text: object, longest: int = _LONGEST, lines: bool = False) -> str:
    """Returns `printable` text, cut to this many characters."""
    shown = printable(str(text)[: longest + 1], lines)
    return shown if len(shown) <= longest else f"{shown[: longest - 4]} ..."
