"""Elements of SVG, whose text is always escaped, and the scales of the charts."""

import math
from collections.abc import Iterable, Iterator

from markupsafe import Markup, escape

from rlk_align.text import printable

Content = Markup | str | Iterable["Content"]


def el(tag: str, *content: Content, **attributes: object) -> Markup:
    """Returns an element; `class_` and `font_size` become `class` and `font-size`, None is
    omitted."""
    written = "".join(
        f' {name.strip("_").replace("_", "-")}="{_text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(map(_inner, content))
    return Markup(f"<{tag}{written}>{inside}</{tag}>" if inside else f"<{tag}{written}/>")


def _inner(content: Content) -> str:
    if isinstance(content, str):
        return str(_text(content))
    return "".join(map(_inner, content))


def _text(value: object) -> Markup:
    """Ours as it is, a number short, all else printable and escaped."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return Markup(f"{value:.1f}".removesuffix(".0"))
    return escape(printable(value))


def chart(name: str, size: tuple[float, float], title: str, desc: str, *content: Content) -> Markup:
    """Returns a chart that scales with its page; `name` is unique on the page."""
    width, height = size
    return el(
        "svg",
        el("title", title, id=f"{name}-title"),
        el("desc", desc, id=f"{name}-desc"),
        *content,
        id=name,
        class_="chart",
        viewBox=f"0 0 {width:g} {height:g}",
        role="group",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
    )


def text(x: float, y: float, words: object, **attributes: object) -> Markup:
    """Returns a text element at (x, y)."""
    return el("text", _text(words), x=x, y=y, **attributes)


def figure(value: float | None) -> str:
    """Writes a value in two digits; a dash where it is not known."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.2g}"


def round_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Returns at most `most` + 1 multiples of 1, 2 or 5 × 10^n from `low` to `high`, with their
    labels; both bounds are finite and `low` is the smaller one."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= most)
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    if places <= 4:
        return [(v, f"{v:,.{places}f}") for v in values]
    return [(v, f"{v:.2g}") for v in values]


class LogScale:
    """A logarithmic axis from `top` (the largest value) to `bottom`, below which is a lane for
    exact zeros."""

    LANE = 26.0

    def __init__(self, values: Iterable[float], top: float, bottom: float) -> None:
        positive = [v for v in values if v > 0 and math.isfinite(v)]
        self.low = math.floor(math.log10(min(positive, default=1e-3)))
        self.high = max(math.ceil(math.log10(max(positive, default=1.0))), self.low + 1)
        self.top, self.bottom = top, bottom

    @property
    def zero(self) -> float:
        """The position of an exact zero."""
        return self.bottom + self.LANE / 2

    def __call__(self, value: float) -> float:
        if value == 0:
            return self.zero
        if not math.isfinite(value):
            return self.top
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.bottom - min(max(share, 0.0), 1.0) * (self.bottom - self.top)

    def decades(self) -> Iterator[tuple[float, str]]:
        """Yields the positions of the powers of ten, with their labels."""
        step = max(1, (self.high - self.low) // 8)
        for power in range(self.low, self.high + 1, step):
            yield self(10.0**power), f"1e{power}" if power else "1"


LEVELS = 10
"""Steps of a heat map's ramp."""
_DECADES = 3.0
"""The most decades of a ramp, because readers look for the largest values."""


class Ramp:
    """Magnitudes as levels of a heat map: 0 for an exact zero, 1 to LEVELS by logarithm."""

    def __init__(self, values: Iterable[float | None]) -> None:
        positive = [v for v in values if v is not None and v > 0 and math.isfinite(v)]
        self.high = math.log10(max(positive, default=1.0))
        self.low = max(math.log10(min(positive, default=1e-3)), self.high - _DECADES)

    def level(self, value: float | None) -> str:
        """Returns the CSS class of a value: `l0` to `l10`, `none` if missing, `bad` if NaN or
        infinite."""
        if value is None:
            return "none"
        if not math.isfinite(value):
            return "bad"
        if value <= 0:
            return "l0"
        share = (math.log10(value) - self.low) / ((self.high - self.low) or 1.0)
        return f"l{min(LEVELS, 1 + max(0, int(share * LEVELS)))}"

    def legend(self) -> list[tuple[str, str]]:
        """Returns the legend of the ramp, as (class, words)."""
        ends = f"{10**self.low:.2g} or less, to {10**self.high:.2g}, by logarithm"
        return [
            ("ramp", ends),
            ("l0", "0: bit-equal"),
            ("none", "no value kept"),
            ("bad", "NaN or infinite"),
        ]
