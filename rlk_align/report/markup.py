"""Escapes foreign text, such as names and reasons, for Markdown in a pull request.

Words of letters, digits and plain punctuation are kept. Any other word is shown as code, in which
no forge looks for links, mentions, emoji or HTML.
"""

import re

from rlk_align.text import short_printable

_LONGEST = 160
"""The most characters of a name."""
_ACTIVE = re.compile(r"[`*_\[\]<>|\\#@~$!&^{}:]|//|www\.|[a-z]\.\w", re.IGNORECASE)
"""Syntax of Markdown or of a forge inside a line, and names with dots."""
_STARTS_A_BLOCK = re.compile(r"[-+=.]|\d+[.)]$")
"""Syntax of Markdown at the start of a line."""


def code(text: object) -> str:
    """Returns text as code in one line, valid inside a table too."""
    shown = short_printable(text, _LONGEST)
    if shown and shown == shown.strip() and not re.search(r"[`|\\]", shown):
        return f"`{shown}`"
    # An entity is never syntax, not even the end of a table's cell.
    spelled = re.sub(r"[^\w. -]|_", lambda c: f"&#{ord(c[0])};", shown)
    return f"<code>{spelled}</code>"


def prose(text: object, longest: int = 600, starts_line: bool = True) -> str:
    """Returns a sentence with names as code. `starts_line`: false for a cell of a table."""
    words = [w for w in short_printable(text, longest).split(" ") if w]
    return " ".join(_word(w, first=starts_line and not at) for at, w in enumerate(words))


def _word(word: str, first: bool) -> str:
    """Returns the word as it is, or as code with the punctuation left outside."""
    bare = word.rstrip(".,;:)").lstrip("(")
    if not _ACTIVE.search(bare) and not (first and _STARTS_A_BLOCK.match(word)):
        return word
    before, after = word[: word.index(bare)], word[word.index(bare) + len(bare) :]
    return f"{before}{code(bare)}{after}"


def table(head: list[str], rows: list[list[str]], names: int = 1) -> str:
    """Returns a table. Cells are Markdown; the first `names` columns have names, the others
    figures."""
    head = [cell.replace("|", "\\|") for cell in head]
    rule = ["---" if at < names else "---:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def block(text: str) -> str:
    """Returns lines as a block of code."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
