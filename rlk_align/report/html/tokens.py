"""The view of one sequence: its error by token and layer, and its text coloured by Δlogp."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.samples import Stretch
from rlk_align.report.html.svg import Ramp, figure
from rlk_align.report.html.token_grid import token_grid
from rlk_align.text import printable


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token of the displayed text."""

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
    """The numbers of tokens before and after the stretch."""


def sample_view(stretch: Stretch, bound: float | None, delta: Ramp, errors: Ramp) -> SampleView:
    """Returns the view of a stretch. `bound`: the contract's bound on the largest |Δlogp|. The
    ramps apply to the whole page."""
    worst, at = stretch.worst
    words = printable(stretch.word(at)) if stretch.ids else ""
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
    """Returns the colour scale of |Δlogp| for the whole page."""
    return Ramp(None if d is None else abs(d) for s in stretches for d in s.delta)


def error_ramp(stretches: list[Stretch]) -> Ramp:
    """Returns the colour scale of relative L2 errors for the whole page."""
    return Ramp(v for s in stretches for row in s.errors.values() for v in row)


def _tokens(stretch: Stretch, bound: float | None, ramp: Ramp) -> Iterator[Token]:
    for n, delta in enumerate(stretch.delta):
        title = f"position {stretch.positions[n]}, id {stretch.ids[n]}"
        if delta is None:
            kind = "sampled, no log-prob" if stretch.sampled[n] else "prompt"
            yield Token(
                text=stretch.word(n), title=f"{title}, {kind}", classes="prompt", breach=False
            )
            continue
        # `not <=`: a NaN breaks any bound.
        breach = bound is not None and not abs(delta) <= bound
        sign = " up" if delta > 0 else " down" if delta < 0 else ""
        classes = f"{ramp.level(abs(delta))} ink{sign}"
        title = f"{title}, Δlogp {delta:+.2g}"
        yield Token(text=stretch.word(n), title=title, classes=classes, breach=breach)


def _heat(stretch: Stretch, ramp: Ramp) -> Figure:
    return token_grid(
        stretch,
        f"tokens-{stretch.sample}",
        f"Token × layer, sample {stretch.sample}",
        "A column for each token, a row for the end of each layer. Colour: relative L2 error of "
        "that row of that site.",
        cells={site: list(map(ramp.level, errors)) for site, errors in stretch.errors.items()},
        table={site: list(map(figure, errors)) for site, errors in stretch.errors.items()},
        details=lambda n: _largest_error(stretch, n),
    )


def _largest_error(stretch: Stretch, n: int) -> str:
    errors = [(site, of_site[n]) for site, of_site in stretch.errors.items()]
    known = [(math.inf if math.isnan(v) else v, site) for site, v in errors if v is not None]
    if not known:
        return "no error kept"
    size, site = max(known, key=lambda error: error[0])
    return f"largest error {figure(size)} at {site}"
