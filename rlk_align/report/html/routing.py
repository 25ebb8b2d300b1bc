"""The routing of a sparse model: which tokens are sent to other experts, in which layers, and the
drift that remains where routing was replayed."""

from dataclasses import dataclass

from markupsafe import Markup

from rlk_align.report.html.figure import Figure
from rlk_align.report.html.samples import Stretch, flipped_samples
from rlk_align.report.html.svg import chart, el, figure, text
from rlk_align.report.html.token_grid import token_grid
from rlk_align.report.routing_words import replay_lines, routing_lines
from rlk_align.report.source import ReportSource
from rlk_align.results import EdgeResult, LayerRouting

_WIDTH, _LEFT, _TOP, _CELL, _RIGHT = 1120.0, 90.0, 22.0, 18.0, 320.0
_STATES = {
    "l0": "equal",
    "none": "not compared",
    "effect": "flipped, its inputs differ already",
    "at-router": "flipped at the router, on equal inputs",
}
"""The class of a cell -> what happened to the token in the layer."""
_LEGEND = [("effect", _STATES["effect"]), ("at-router", f"× {_STATES['at-router']}")]


@dataclass(frozen=True, kw_only=True)
class RoutingPanel:
    """The page's section on routing."""

    lines: list[str]
    layers: Figure
    samples: list[tuple[str, Figure]]
    """The summary and the chart of each sequence with flips."""
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
    """Returns the section; None for a dense model."""
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
    """The class of one cell, a key of `_STATES`; `read`: the site that the layer's router reads."""
    flipped = stretch.errors[choice][n]
    if flipped is None:
        return "none"
    if not flipped:
        return "l0"
    return "at-router" if stretch.errors.get(read, [None] * (n + 1))[n] == 0 else "effect"


def _summary(stretch: Stretch, choices: dict[int, str]) -> str:
    here = sum(any(stretch.errors[c][n] for c in choices.values()) for n in range(len(stretch.ids)))
    return (
        f"sample {stretch.sample}: {here:,} of the {len(stretch.ids):,} tokens shown are sent to "
        "other experts in some layer"
    )


def _by_token(stretch: Stretch, choices: dict[int, str], inputs: dict[int, str]) -> Figure:
    count = len(stretch.ids)
    states = {
        f"layer {layer}": [_state(stretch, n, site, inputs[layer]) for n in range(count)]
        for layer, site in choices.items()
    }

    def details(n: int) -> str:
        flips = [f"{row}: {_STATES[of[n]]}" for row, of in states.items() if of[n] != "l0"]
        return "; ".join(flips) or "the same experts"

    return token_grid(
        stretch,
        f"routing-{stretch.sample}",
        f"Token × sparse layer, sample {stretch.sample}",
        "A column for each token, a row for each sparse layer; a cell is filled where the token is "
        "sent to other experts.",
        cells=states,
        table={row: [_STATES[s].partition(",")[0] for s in of] for row, of in states.items()},
        details=details,
        signs={"at-router": "×"},
        legend=[*_LEGEND, ("none", "not compared")],
    )


def _replays(source: ReportSource) -> list[list[str]]:
    """Returns the drift of each replayed edge with the engine's own routing, and its two parts."""
    table = []
    for edge in source.verdict.comparison.edges:
        replay = source.probe.replay(edge.name) if source.probe else None
        if replay is None or edge.routing is None:
            continue
        routing = edge.routing
        whole = (routing.mean_abs_dlogp_flipped, routing.mean_abs_dlogp_other)
        rest = (replay.mean_abs_rest_flipped, replay.mean_abs_rest_other)
        for part, metrics, means in (
            ("with routing", edge.metrics, whole),
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
