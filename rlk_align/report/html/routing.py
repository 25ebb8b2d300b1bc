"""The routing of a sparse model: which tokens are sent to other experts, in which layers, and what
is left of the drift where routing was replayed."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.samples import Stretch, flipped_samples
from rlk_align.report.html.svg import chart, el, figure, text
from rlk_align.report.html.tokens import word
from rlk_align.report.routing_words import replay_lines, routing_lines
from rlk_align.report.source import ReportSource
from rlk_align.results import EdgeResult, LayerRouting

_WIDTH, _LEFT, _TOP, _CELL, _RIGHT = 1120.0, 90.0, 22.0, 18.0, 320.0
_LEGEND = [
    ("effect", "flipped, its inputs differ already"),
    ("at-router", "× flipped at the router, on equal inputs"),
]
_STATES = {
    "": "equal",
    "none": "not compared",
    "effect": "flipped: its inputs differ already",
    "at-router": "flipped at the router, on equal inputs",
}
"""What a token is to a layer, by the class of its cell."""


@dataclass(frozen=True, kw_only=True)
class RoutingPanel:
    """What the page says of routing."""

    lines: list[str]
    layers: Figure
    samples: list[tuple[str, Figure]]
    """For each sequence with flips, what is said of it before it is opened, and its chart."""
    replays: list[list[str]]
    """Rows of the table of drift with and without routing; empty where nothing was replayed."""


REPLAY_COLUMNS = (
    "edge",
    "part",
    "max |Δ|",
    "mean |Δ|",
    "mean |Δ|, flipped",
    "mean |Δ|, others",
    "k3",
)


def routing_panel(source: ReportSource, edge: EdgeResult) -> RoutingPanel | None:
    """None for a dense model."""
    routing = edge.routing
    if routing is None:
        return None
    lines = [line.strip() for line in routing_lines(edge, source.verdict.contract)]
    replay = source.probe.replay(edge.name) if source.probe else None
    if replay is not None:
        lines += [line.strip() for line in replay_lines(replay, edge)]
    choices = {layer.layer: layer.site for layer in routing.layers}
    inputs = {n: f"layers.{n}.mlp_norm" for n in choices}
    stretches = (
        flipped_samples(source, edge, list(choices.values()), list(inputs.values()))
        if source.run.has_rows
        else []
    )
    return RoutingPanel(
        lines=lines,
        layers=_by_layer(routing.layers, edge.name),
        samples=[(_summary(s, choices), _by_token(s, choices, inputs)) for s in stretches],
        replays=_replays(source),
    )


def _by_layer(layers: list[LayerRouting], edge: str) -> Figure:
    most = max((layer.flipped for layer in layers), default=0) or 1
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    title = f"Flips by layer, {edge}"
    desc = (
        "A bar for each sparse layer: how many rows are sent to other experts on the two sides, in "
        "two parts: those whose router was given equal inputs, and those whose inputs differ."
    )
    parts: list[Markup] = []
    for n, layer in enumerate(layers):
        y, effects = _TOP + n * _CELL, layer.flipped - layer.at_router
        x = _LEFT
        for count, kind in ((layer.at_router, "at-router"), (effects, "effect")):
            if count:
                box = {"x": x, "y": y, "width": count * scale, "height": _CELL - 4}
                parts.append(el("rect", class_=kind, **box))
                x += count * scale
        at = y + 0.65 * _CELL
        parts.append(text(_LEFT - 6, at, f"layer {layer.layer}", class_="label end"))
        words = f"{layer.flipped:,} of {layer.rows:,} ({layer.flipped / max(1, layer.rows):.1%})"
        also = f", × {layer.at_router:,} at the router" if layer.at_router else ""
        parts.append(text(x + 6, at, words + also, class_="label"))
    return Figure(
        name="routing-layers",
        title=title,
        caption=[],
        svg=chart("routing-layers", (_WIDTH, _TOP + _CELL * len(layers) + 6), title, desc, parts),
        legend=_LEGEND,
        columns=["layer", "rows", "flipped", "at the router", "ties", "largest gap, roundings"],
        rows=[
            [
                *(str(layer.layer), str(layer.rows), str(layer.flipped), str(layer.at_router)),
                *(str(layer.ties), figure(layer.largest_gap) if layer.measured else "–"),
            ]
            for layer in layers
        ],
    )


def _state(stretch: Stretch, n: int, choice: str, read: str) -> str:
    """The class of one cell, of `_STATES`; `read`: what the layer's router takes."""
    flipped = stretch.errors[choice][n]
    if flipped is None:
        return "none"
    if not flipped:
        return ""
    return "at-router" if stretch.errors.get(read, [None] * (n + 1))[n] == 0 else "effect"


def _summary(stretch: Stretch, choices: dict[int, str]) -> str:
    here = sum(any(stretch.errors[c][n] for c in choices.values()) for n in range(len(stretch.ids)))
    return (
        f"sample {stretch.sample}: {here:,} of the {len(stretch.ids):,} tokens shown are sent to "
        "other experts in some layer"
    )


def _by_token(stretch: Stretch, choices: dict[int, str], inputs: dict[int, str]) -> Figure:
    count = len(stretch.ids)
    width, bottom = (_WIDTH - _LEFT) / max(1, count), _TOP + _CELL * len(choices)
    states = {
        layer: [_state(stretch, n, site, inputs[layer]) for n in range(count)]
        for layer, site in choices.items()
    }
    name, title = f"routing-{stretch.sample}", f"Token × sparse layer, sample {stretch.sample}"
    desc = (
        "A column for each token, a row for each sparse layer; a cell is filled where the token is "
        "sent to other experts. A line separates the prompt from the sampled tokens."
    )
    parts = [*_cells(states, width)]
    for row, layer in enumerate(states):
        y = _TOP + (row + 0.7) * _CELL
        parts.append(text(_LEFT - 6, y, f"layer {layer}", class_="label end"))
    boundary = next((n for n, s in enumerate(stretch.sampled) if s), count)
    x = _LEFT + boundary * width
    parts.append(el("line", x1=x, x2=x, y1=_TOP - 16, y2=bottom, class_="boundary"))
    parts.append(text(x - 4, _TOP - 6, "prompt", class_="label end") if boundary else Markup(""))
    if boundary < count:
        parts.append(text(x + 4, _TOP - 6, "sampled", class_="label"))
    columns = [_column(stretch, n, states, width, bottom) for n in range(count)]
    size = (_WIDTH, bottom + 4)
    return Figure(
        name=name,
        title=title,
        caption=[],
        svg=chart(name, size, title, desc, parts, el("g", *columns, data_roving="x")),
        legend=[*_LEGEND, ("none", "not compared")],
        columns=["position", "token", "Δlogp", *(f"layer {layer}" for layer in states)],
        rows=[
            [
                *(str(stretch.positions[n]), word(stretch, n), _delta(stretch, n)),
                *(_STATES[of[n]].partition(":")[0].partition(",")[0] for of in states.values()),
            ]
            for n in range(count)
        ],
    )


def _delta(stretch: Stretch, n: int) -> str:
    delta = stretch.delta[n]
    return "" if delta is None else f"{delta:+.2g}"


def _cells(states: dict[int, list[str]], width: float) -> Iterator[Markup]:
    """A ground for each layer, one path for all cells of a kind, and the sign of those at a
    router."""
    cells: dict[str, list[str]] = defaultdict(list)
    for row, of in enumerate(states.values()):
        y = _TOP + row * _CELL
        yield el("rect", x=_LEFT, y=y, width=width * len(of), height=_CELL - 2, class_="l0")
        for n, state in enumerate(of):
            if state:
                x, size = _LEFT + n * width, max(1.0, width)
                path = f"M{x:.1f} {y:g}h{size:.1f}v{_CELL - 2:g}h-{size:.1f}z"
                cells[state].append(path)
    for state in sorted(cells):
        yield el("path", d="".join(cells[state]), class_=state)
    for row, of in enumerate(states.values()):
        for n, state in enumerate(of):
            if state == "at-router":
                x, y = _LEFT + (n + 0.5) * width, _TOP + (row + 0.65) * _CELL
                yield text(x, y, "×", class_="middle on-router")


def _column(
    stretch: Stretch, n: int, states: dict[int, list[str]], width: float, bottom: float
) -> Markup:
    flipped = [f"layer {i}: {_STATES[of[n]]}" for i, of in states.items() if of[n]]
    words = f"position {stretch.positions[n]}, {'sampled' if stretch.sampled[n] else 'prompt'}: "
    words += f"“{word(stretch, n)}”"
    delta = _delta(stretch, n)
    words += f", Δlogp {delta}" if delta else ""
    words += f"; {'; '.join(flipped)}" if flipped else "; the same experts"
    area = el("rect", x=_LEFT + n * width, y=_TOP, width=width, height=bottom - _TOP)
    return el("g", el("title", words), area, class_="hit", role="img", aria_label=words)


def _replays(source: ReportSource) -> list[list[str]]:
    """The drift of each replayed edge with the engine's own routing, and the two parts of it."""
    table = []
    for edge in source.verdict.comparison.edges:
        replay = source.probe.replay(edge.name) if source.probe else None
        if replay is None or edge.routing is None:
            continue
        routing = edge.routing
        own = (routing.mean_abs_dlogp_flipped, routing.mean_abs_dlogp_other)
        rest = (replay.mean_abs_rest_flipped, replay.mean_abs_rest_other)
        for part, metrics, means in (
            ("with routing", edge.metrics, own),
            ("routing by itself", replay.routing, None),
            (f"rest: {replay.side} computes the other side's experts", replay.rest, rest),
        ):
            table.append(
                [
                    *(edge.name, part),
                    *(figure(metrics.max_abs_dlogp), figure(metrics.mean_abs_dlogp)),
                    *(figure(m) for m in means or (None, None)),
                    figure(metrics.k3),
                ]
            )
    return table
