"""One sequence: its error by token and layer, and its text coloured by Δlogp."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.samples import Stretch
from rlk_align.report.html.svg import Ramp, chart, el, figure, text
from rlk_align.text import printable

_WIDTH, _LEFT, _TOP, _CELL = 1120.0, 130.0, 22.0, 16.0


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token of the text, as it is shown."""

    text: str
    title: str
    classes: str
    breach: bool
    """Whether its |Δlogp| is above the contract's bound on the largest."""


@dataclass(frozen=True, kw_only=True)
class SampleView:
    """One sequence on the page."""

    sample: int
    summary: str
    heat: Figure
    tokens: list[Token]
    before: int
    after: int
    """Tokens that are left out on either side."""


def sample_view(stretch: Stretch, bound: float | None, delta: Ramp, errors: Ramp) -> SampleView:
    """`bound`: the contract's on the largest |Δlogp|; the ramps are those of the whole page."""
    worst, at = stretch.worst
    words = printable(word(stretch, at)) if stretch.ids else ""
    return SampleView(
        sample=stretch.sample,
        summary=f"sample {stretch.sample}: max |Δlogp| {worst:.2g}, at position "
        f"{stretch.positions[at]}, “{words}”",
        heat=_heat(stretch, errors),
        tokens=list(_tokens(stretch, bound, delta)),
        before=stretch.before,
        after=stretch.after,
    )


def delta_ramp(stretches: list[Stretch]) -> Ramp:
    """The colour scale of |Δlogp| on the whole page."""
    return Ramp(None if d is None else abs(d) for s in stretches for d in s.delta)


def error_ramp(stretches: list[Stretch]) -> Ramp:
    """The colour scale of relative L2 errors on the whole page."""
    return Ramp(v for s in stretches for row in s.errors.values() for v in row)


def word(stretch: Stretch, at: int) -> str:
    """The text of a token, or its id where the text is empty or unknown."""
    words = stretch.texts[at]
    return words if words else f"⟨{stretch.ids[at]}⟩"


def _tokens(stretch: Stretch, bound: float | None, ramp: Ramp) -> Iterator[Token]:
    for n, delta in enumerate(stretch.delta):
        title = f"position {stretch.positions[n]}, id {stretch.ids[n]}"
        if delta is None:
            kind = "sampled, no log-prob" if stretch.sampled[n] else "prompt"
            yield Token(
                text=word(stretch, n), title=f"{title}, {kind}", classes="prompt", breach=False
            )
            continue
        # `not <=`: a NaN is above any bound.
        breach = bound is not None and not abs(delta) <= bound
        sign = " up" if delta > 0 else " down" if delta < 0 else ""
        classes = f"{ramp.level(abs(delta))} ink{sign}"
        title = f"{title}, Δlogp {delta:+.2g}"
        yield Token(text=word(stretch, n), title=title, classes=classes, breach=breach)


def _heat(stretch: Stretch, ramp: Ramp) -> Figure:
    sites, count = list(stretch.errors), len(stretch.ids)
    width = (_WIDTH - _LEFT) / max(1, count)
    bottom = _TOP + _CELL * len(sites)
    name, title = f"tokens-{stretch.sample}", f"Token × layer, sample {stretch.sample}"
    desc = (
        "A column for each token, a row for the end of each layer. Colour: relative L2 error of "
        "that row of that site. A line separates the prompt (prefill) from the sampled tokens "
        "(decode)."
    )
    parts = [*_paths(stretch, sites, width, ramp), *_names(sites)]
    boundary = next((n for n, s in enumerate(stretch.sampled) if s), count)
    x = _LEFT + boundary * width
    parts.append(el("line", x1=x, x2=x, y1=_TOP - 16, y2=bottom, class_="boundary"))
    if boundary:
        parts.append(text(x - 4, _TOP - 6, "prompt (prefill)", class_="label end"))
    if boundary < count:
        parts.append(text(x + 4, _TOP - 6, "sampled (decode)", class_="label"))
    columns = [_column(stretch, n, width, bottom) for n in range(count)]
    return Figure(
        name=name,
        title=title,
        caption=[],
        svg=chart(
            name, (_WIDTH, bottom + 4), title, desc, parts, el("g", *columns, data_roving="x")
        ),
        columns=["position", "token", "Δlogp", *sites],
        rows=[
            [
                str(stretch.positions[n]),
                word(stretch, n),
                "" if stretch.delta[n] is None else f"{stretch.delta[n]:+.2g}",
                *(figure(stretch.errors[s][n]) for s in sites),
            ]
            for n in range(count)
        ],
    )


def _names(sites: list[str]) -> Iterator[Markup]:
    for row, site in enumerate(sites):
        yield text(_LEFT - 6, _TOP + (row + 0.75) * _CELL, site, class_="label end")


def _paths(stretch: Stretch, sites: list[str], width: float, ramp: Ramp) -> Iterator[Markup]:
    """One path for each level: all cells of that colour, neighbours in a row as one."""
    cells: dict[str, list[str]] = defaultdict(list)
    for row, site in enumerate(sites):
        levels = [ramp.level(v) for v in stretch.errors[site]]
        start = 0
        for n in range(1, len(levels) + 1):
            if n == len(levels) or levels[n] != levels[start]:
                x, y, length = _LEFT + start * width, _TOP + row * _CELL, (n - start) * width
                path = f"M{x:.1f} {y:g}h{length:.1f}v{_CELL - 1:g}h-{length:.1f}z"
                cells[levels[start]].append(path)
                start = n
    for level in sorted(cells):
        yield el("path", d="".join(cells[level]), class_=level)


def _column(stretch: Stretch, n: int, width: float, bottom: float) -> Markup:
    errors = [(s, v[n]) for s, v in stretch.errors.items() if v[n] is not None]
    known = [(s, math.inf if math.isnan(v) else v) for s, v in errors if v is not None]
    worst = max(known, key=lambda item: item[1], default=None)
    delta = stretch.delta[n]
    words = f"position {stretch.positions[n]}, {'sampled' if stretch.sampled[n] else 'prompt'}: "
    words += f"“{word(stretch, n)}”"
    words += "" if delta is None else f", Δlogp {delta:+.2g}"
    words += f"; largest error {figure(worst[1])} at {worst[0]}" if worst else "; no error kept"
    area = el("rect", x=_LEFT + n * width, y=_TOP, width=width, height=bottom - _TOP)
    return el("g", el("title", words), area, class_="hit", role="img", aria_label=words)
