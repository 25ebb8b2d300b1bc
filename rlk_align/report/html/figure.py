"""A chart with its title, its caption, and its data as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One chart of a page."""

    name: str
    """Unique on its page."""
    title: str
    caption: list[str]
    """Sentences that describe the chart."""
    svg: Markup
    legend: list[tuple[str, str]] = field(default_factory=list)
    """(class of the swatch, words)."""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """The data of the chart."""
