"""Text that is not ours, made fit to print: names, paths, and what engines and patches say."""

from pydantic import ValidationError
from rich.text import Text


def printable(text: object, lines: bool = False) -> str:
    """`text` with everything that a terminal would act upon, or not show, as an escape.

    Control characters, bidirectional overrides, zero-width characters and lone surrogates become
    `\\x1b`, `\\u202e` ...; `lines` keeps line breaks and tabs.
    """
    allowed = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def line(text: object = "", style: str = "") -> Text:
    """One line for the terminal: printable, and never read as markup."""
    return Text(printable(text), style=style)


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, as `where: what`; of fields that are missing, all of them."""
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
    """What another package's error says, in a line of at most 300 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."


def short_printable(text: object, longest: int = _LONGEST, lines: bool = False) -> str:
    """`printable`, cut to this many characters."""
    shown = printable(str(text)[: longest + 1], lines)
    return shown if len(shown) <= longest else f"{shown[: longest - 4]} ..."
