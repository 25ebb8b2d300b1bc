"""A chart of one sequence: a column for each token, a row for each site or layer."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from markupsafe import Markup

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.samples import Stretch
from rlk_align.report.html.svg import chart, el, text

_WIDTH, _LEFT, _TOP, _CELL = 1120.0, 130.0, 22.0, 17.0


def token_grid(
    stretch: Stretch,
    name: str,
    title: str,
    desc: str,
    *,
    cells: Mapping[str, Sequence[str]],
    table: Mapping[str, Sequence[str]],
    details: Callable[[int], str],
    signs: Mapping[str, str] | None = None,
    legend: Sequence[tuple[str, str]] = (),
) -> Figure:
    """Draws a stretch of a sequence.

    `cells`: row -> the CSS class of each token's cell. `table`: row -> each token's entry in the
    table of the chart's data. `details` says of a token, by its number in the stretch, what its
    column shows. `signs`: CSS class -> the sign that its cells bear.
    """
    count = len(stretch.ids)
    width, bottom = (_WIDTH - _LEFT) / max(1, count), _TOP + _CELL * len(cells)
    drawn = [*_paths(cells, width), *_signs(cells, signs or {}, width), *_names(cells)]
    columns = [_column(stretch, n, details(n), width, bottom) for n in range(count)]
    return Figure(
        name=name,
        title=title,
        caption=[],
        svg=chart(
            name,
            (_WIDTH, bottom + 4),
            title,
            f"{desc} A line separates the prompt (prefill) from the sampled tokens (decode).",
            drawn,
            _boundary(stretch, width, bottom),
            el("g", *columns, data_roving="x"),
        ),
        legend=list(legend),
        columns=["position", "token", "Δlogp", *table],
        rows=[
            [
                str(stretch.positions[n]),
                stretch.word(n),
                stretch.delta_text(n),
                *(entries[n] for entries in table.values()),
            ]
            for n in range(count)
        ],
    )


def _paths(cells: Mapping[str, Sequence[str]], width: float) -> Iterator[Markup]:
    """One path for each class: all its cells, neighbours in a row as one."""
    drawn: dict[str, list[str]] = defaultdict(list)
    for row, classes in enumerate(cells.values()):
        start = 0
        for n in range(1, len(classes) + 1):
            if n == len(classes) or classes[n] != classes[start]:
                x, y, length = _LEFT + start * width, _TOP + row * _CELL, (n - start) * width
                path = f"M{x:.1f} {y:g}h{length:.1f}v{_CELL - 1:g}h-{length:.1f}z"
                drawn[classes[start]].append(path)
                start = n
    for class_ in sorted(drawn):
        yield el("path", d="".join(drawn[class_]), class_=class_)


def _signs(
    cells: Mapping[str, Sequence[str]], signs: Mapping[str, str], width: float
) -> Iterator[Markup]:
    for row, classes in enumerate(cells.values()):
        for n, class_ in enumerate(classes):
            if class_ in signs:
                x, y = _LEFT + (n + 0.5) * width, _TOP + (row + 0.7) * _CELL
                yield text(x, y, signs[class_], class_="middle sign")


def _names(cells: Mapping[str, Sequence[str]]) -> Iterator[Markup]:
    for row, name in enumerate(cells):
        yield text(_LEFT - 6, _TOP + (row + 0.75) * _CELL, name, class_="label end")


def _boundary(stretch: Stretch, width: float, bottom: float) -> Iterator[Markup]:
    """A line before the first sampled token."""
    first = next((n for n, sampled in enumerate(stretch.sampled) if sampled), len(stretch.ids))
    x = _LEFT + first * width
    yield el("line", x1=x, x2=x, y1=_TOP - 16, y2=bottom, class_="boundary")
    if first:
        yield text(x - 4, _TOP - 6, "prompt (prefill)", class_="label end")
    if first < len(stretch.ids):
        yield text(x + 4, _TOP - 6, "sampled (decode)", class_="label")


def _column(stretch: Stretch, n: int, details: str, width: float, bottom: float) -> Markup:
    """An area that shows a token's values to a pointer and to a screen reader."""
    words = f"position {stretch.positions[n]}, {'sampled' if stretch.sampled[n] else 'prompt'}: "
    words += f"“{stretch.word(n)}”"
    delta = stretch.delta_text(n)
    words += f", Δlogp {delta}" if delta else ""
    words += f"; {details}"
    area = el("rect", x=_LEFT + n * width, y=_TOP, width=width, height=bottom - _TOP)
    return el("g", el("title", words), area, class_="hit", role="img", aria_label=words)
