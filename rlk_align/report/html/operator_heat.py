"""The heat map of layers and operators, which shows where the sides differ."""

from collections.abc import Iterator

from markupsafe import Markup

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.svg import Ramp, chart, el, figure, text
from rlk_align.report.operator_facts import STATES, OperatorFacts

_WIDTH, _LEFT, _RIGHT, _TOP, _CELL = 1120.0, 70.0, 44.0, 66.0, 20.0
_SIGNED = ("over", "waived", "near", "introducer")
"""States whose sign is drawn in the cell."""
_OUTER = 150.0
"""Width of a cell that belongs to no layer and bears its name."""


def operator_heat(operators: list[OperatorFacts]) -> Figure:
    """Draws the mean relative L2 error of every operator; a cell links to its row in the table."""
    ramp = Ramp(o.mean for o in operators)
    ops = list(dict.fromkeys(o.site.op for o in operators if o.site.layer is not None))
    layers = sorted({o.site.layer for o in operators if o.site.layer is not None})
    outer = [o for o in operators if o.site.layer is None]
    height = _TOP + _CELL * (len(layers) + 1) + 8
    desc = (
        "A row for each layer, a column for each operator in execution order, a row below for what "
        "belongs to no layer. Colour: mean relative L2 error, by logarithm. A cross marks "
        "an operator beyond its budget, a diamond one that introduces a difference."
    )
    cells = [*_grid(operators, ops, layers, ramp), *_outer(outer, len(layers), ramp)]
    title = "Layer × operator"
    names = list(_names(ops, layers))
    return Figure(
        name="heat",
        title=title,
        caption=[
            "Colour: mean relative L2 error over the rows that differ. "
            "Select a cell to find the operator in the table below."
        ],
        svg=chart(
            "heat", (_WIDTH, height), title, desc, names, el("g", *cells, data_roving="grid")
        ),
        legend=[
            *ramp.legend(),
            *((f"sign {state}", f"{STATES[state][0]} {STATES[state][1]}") for state in _SIGNED),
        ],
        columns=["site", "state", "mean relative L2"],
        rows=[[o.site.site, STATES[o.state][1], figure(o.mean)] for o in operators],
    )


def _names(ops: list[str], layers: list[int]) -> Iterator[Markup]:
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(ops))
    for n, op in enumerate(ops):
        x, y = _LEFT + (n + 0.5) * width, _TOP - 8
        turn = f"rotate(-35 {x:.1f} {y:.1f})"
        yield text(x, y, op, class_="label", transform=turn)
    for n, layer in enumerate(layers):
        yield text(_LEFT - 6, _TOP + (n + 0.7) * _CELL, f"layer {layer}", class_="label end")


def _grid(
    operators: list[OperatorFacts], ops: list[str], layers: list[int], ramp: Ramp
) -> Iterator[Markup]:
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(ops))
    columns, rows = ({name: n for n, name in enumerate(names)} for names in (ops, layers))
    for o in operators:
        if o.site.layer is not None:
            column, row = columns[o.site.op], rows[o.site.layer]
            place = (_LEFT + column * width, _TOP + row * _CELL)
            yield _cell(o, place, width, ramp, "", (row, column))


def _outer(outer: list[OperatorFacts], row: int, ramp: Ramp) -> Iterator[Markup]:
    for n, o in enumerate(outer):
        place = (_LEFT + n * _OUTER, _TOP + row * _CELL + 6)
        yield _cell(o, place, _OUTER, ramp, o.site.site, (row, n))


def _cell(
    o: OperatorFacts,
    place: tuple[float, float],
    width: float,
    ramp: Ramp,
    label: str,
    at: tuple[int, int],
) -> Markup:
    """Returns a link whose colour shows the error and whose sign shows the state."""
    x, y = place
    sign = STATES[o.state][0] if o.state in _SIGNED else ""
    level = ramp.level(o.mean)
    words = " ".join(filter(None, [sign, label]))
    return el(
        "a",
        el("title", o.summary),
        el("rect", x=x + 0.5, y=y + 0.5, width=width - 1, height=_CELL - 1, class_=level),
        text(x + width / 2, y + _CELL * 0.7, words, class_=f"ink {level}") if words else "",
        href=f"#op-{o.order}",
        id=f"cell-{o.order}",
        class_="cell",
        aria_label=o.summary,
        data_op=o.order,
        data_row=at[0],
        data_column=at[1],
    )
