"""Files for Google's Model Explorer: graphs of the operators, node data with their results, and a
mapping between the operators of both engines.

canonical.json       the canonical operators engines.json         two graphs, `rollout` and `train`:
the operators by the engines' own modules navigation.json      the two-pane mapping of the second
onto the first relative-l2.json, introduced.json, inherited.json, side.json      node data for all
three graphs
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from rlk_align.errors import BadOption
from rlk_align.judge.verdict import headline
from rlk_align.model.operators import OPERATORS
from rlk_align.report.operator_facts import STATES, OperatorFacts, operator_facts
from rlk_align.report.source import ReportSource
from rlk_align.results import SideName
from rlk_align.text import printable

Inputs = Mapping[str, Sequence[str]]
"""Site -> the sites that it reads."""

_GRADIENT = [
    {"stop": 0, "bgColor": "#f3efc6"},
    {"stop": 0.5, "bgColor": "#6cac74"},
    {"stop": 1, "bgColor": "#2d2a6b"},
]
_SIDES = {"rollout": "#e3a335", "train": "#6db6f5", "both": "#d0453a", "neither": "#b9a7d6"}


def model_explorer_files(source: ReportSource, inputs: Inputs) -> dict[str, str]:
    """Returns the text of each file by name, for the headline edge of the verdict. Raises BadOption
    where the run compared nothing."""
    edge = headline(source.verdict)
    if edge is None or source.verdict.comparison.stopped:
        raise BadOption(
            f"{source.folder} compared no operators: there is no graph to draw",
            "correct what stopped the comparison, and compare again",
        )
    operators = operator_facts(source, edge)
    names: dict[str, Callable[[OperatorFacts], str]] = {"canonical": lambda o: o.site.site}
    names |= {side: _namer(side) for side in get_args(SideName)}
    graphs = {
        graph: {"id": graph, "nodes": list(_nodes(operators, inputs, graph, name))}
        for graph, name in names.items()
    }
    mapping = {names["rollout"](o): names["train"](o) for o in operators}
    files: dict[str, Any] = {
        "canonical.json": _labelled(f"{source.name}: {edge.name}", graphs["canonical"]),
        "engines.json": _labelled(f"{source.name}: engines", graphs["rollout"], graphs["train"]),
        "navigation.json": {
            "type": "sync_navigation",
            "mapping": mapping,
            "showDiffHighlights": True,
        },
    }
    for file, label, sizes in (
        ("relative-l2.json", "mean relative L2 error", [o.mean for o in operators]),
        ("introduced.json", "introduced, relative L2", [o.introduced for o in operators]),
        ("inherited.json", "inherited, relative L2", [o.inherited for o in operators]),
    ):
        values = _logarithms(sizes)
        files[file] = {
            graph: {
                "name": f"{label}, log10 (lowest: exactly 0)",
                "results": {
                    name(o): {"value": v}
                    for o, v in zip(operators, values, strict=True)
                    if v is not None
                },
                "gradient": _GRADIENT,
            }
            for graph, name in names.items()
        }
    files["side.json"] = {
        graph: {"name": "which side is off", "results": dict(_sides(operators, name))}
        for graph, name in names.items()
    }
    return {
        file: json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        for file, content in files.items()
    }


def _labelled(label: str, *graphs: dict[str, Any]) -> dict[str, Any]:
    for graph in graphs:
        ids = [node["id"] for node in graph["nodes"]]
        assert len(set(ids)) == len(ids), f"{graph['id']}: a node occurs twice"
    return {"label": printable(label), "graphs": list(graphs)}


def _namer(side: SideName) -> Callable[[OperatorFacts], str]:
    """Returns the function that names nodes in an engine's graph: by module and site."""

    def name(o: OperatorFacts) -> str:
        module = _module(o, side)
        return f"{module}:{o.site.site}" if module else o.site.site

    return name


def _module(o: OperatorFacts, side: str) -> str:
    """Returns the module in which a side computes the operator; empty where it is unknown."""
    return next((u.code.module for u in o.refereed if u.side == side and u.code), "")


def _namespace(o: OperatorFacts, graph: str) -> str:
    """Returns the path of the module, or e.g. `layers/0/attn` where it is unknown."""
    module = _module(o, graph)
    if module:
        return "/".join(filter(None, module.split(".")))
    if o.site.layer is None:
        return ""
    record = OPERATORS.get(o.site.op)
    return f"layers/{o.site.layer}/{(record and record.part) or 'mlp'}"


def _nodes(
    operators: list[OperatorFacts], inputs: Inputs, graph: str, name: Callable[[OperatorFacts], str]
) -> Iterator[dict[str, Any]]:
    known = {o.site.site: name(o) for o in operators}
    for o in operators:
        read = [known[site] for site in inputs.get(o.site.site, ()) if site in known]
        yield {
            "id": name(o),
            "label": o.site.op,
            "namespace": _namespace(o, graph),
            "attrs": [{"key": k, "value": printable(v)} for k, v in _attributes(o)],
            "incomingEdges": [
                {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(n)}
                for n, source in enumerate(read)
            ],
            "outputsMetadata": [
                {"id": "0", "attrs": [{"key": "site", "value": printable(o.site.site)}]}
            ],
        }


def _attributes(o: OperatorFacts) -> Iterator[tuple[str, str]]:
    yield "state", STATES[o.state][1]
    yield "op class", o.site.op_class
    yield "rows that differ", f"{o.site.differ:,} of {o.site.rows:,}"
    sizes = {
        "mean relative L2": o.mean,
        "largest relative L2": o.largest,
        "introduced": o.introduced,
        "inherited": o.inherited,
        "gain": o.unit.gain if o.unit else None,
    }
    yield from ((name, f"{size:.3g}") for name, size in sizes.items() if size is not None)
    if o.side:
        yield "side", o.side
    yield from (("how", how) for how in o.how)
    for u in o.refereed:
        if u.code is not None:
            yield f"code, {u.side} {u.passname}", str(u.code)


def _logarithms(sizes: list[float | None]) -> list[float | None]:
    """Returns log10 of sizes; an exact 0 is one below all others, a NaN or an infinity one
    above."""
    positive = [math.log10(s) for s in sizes if s is not None and s > 0 and math.isfinite(s)]
    low, high = min(positive, default=0.0) - 1, max(positive, default=0.0) + 1

    def value(size: float | None) -> float | None:
        if size is None:
            return None
        if not math.isfinite(size):
            return high
        return math.log10(size) if size > 0 else low

    return [None if v is None else round(v, 3) for v in map(value, sizes)]


def _sides(
    operators: list[OperatorFacts], name: Callable[[OperatorFacts], str]
) -> Iterator[tuple[str, dict[str, str]]]:
    for o in operators:
        if o.over:
            side = o.over.side
            colour = {"bgColor": _SIDES[side]} if side else {}
            yield name(o), {"value": side or "not known", **colour}
