"""Text as Markdown, whatever it says: names and reasons are not ours, and a pull request renders
them.

What only letters, digits and plain punctuation make up stands as it is. Any other word is shown as
code, in which no forge looks for links, mentions, emoji or HTML.
"""

import re

from rlk_align.text import short_printable

_LONGEST = 160
"""Characters of one name."""
_ACTIVE = re.compile(r"[`*_\[\]<>|\\#@~$!&^{}:]|//|www\.|[a-z]\.\w", re.IGNORECASE)
"""What Markdown, or what a forge makes of it, acts upon inside a line; and names with dots."""
_STARTS_A_BLOCK = re.compile(r"[-+=.]|\d+[.)]$")
"""What it acts upon where a line begins."""


def code(text: object) -> str:
    """`text` as code, in one line, also inside a table."""
    shown = short_printable(text, _LONGEST)
    if shown and shown == shown.strip() and not re.search(r"[`|\\]", shown):
        return f"`{shown}`"
    # An entity is never read as syntax, not even as the end of a table's cell.
    spelled = re.sub(r"[^\w. -]|_", lambda c: f"&#{ord(c[0])};", shown)
    return f"<code>{spelled}</code>"


def prose(text: object, longest: int = 600, starts_line: bool = True) -> str:
    """A sentence with names in it; in a table's cell it starts no line."""
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
    """Cells are Markdown; the first `names` columns are of names, the others of figures."""
    head = [cell.replace("|", "\\|") for cell in head]
    rule = ["---" if at < names else "---:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def block(text: str) -> str:
    """Lines that stand as they are."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
