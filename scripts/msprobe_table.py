"""The tables of compare_msprobe.py's report, as Markdown."""

from collections.abc import Iterator
from typing import Any

OURS = ("all values", "500 KB of values", "digests alone")
TASKS = ("checksums", "statistics", "tensors")
ALIKE = "hf:attn=sdpa"
"""On both sides: the faults that are counted."""

Said = dict[str, Any]


def tables(report: Said) -> str:
    """What each names over all pairs, what one pair takes, and the pairs that some tool misses."""
    return "\n".join([*_counts(report), "", *_costs(report), "", *_pairs(report), ""])


def _counts(report: Said) -> Iterator[str]:
    """By tool: how many faults between two sides that are built alike are named exactly, and what
    is said of two kinds of attention without a fault."""
    yield "| | faults named exactly | with the side that is off | eager against sdpa, no fault |"
    yield "| --- | ---: | ---: | --- |"
    pairs = [p for p in report["pairs"] if p["rollout"].startswith("hf")]
    faults = [p for p in pairs if p["site"] and p["rollout"] == ALIKE]
    (kinds,) = (p for p in pairs if not p["site"] and p["rollout"] != p["train"])
    for name in OURS:
        values = name != OURS[-1]
        by = "exact" if values else "bitwise_exact"
        exact = sum(p["ours"][name][by] for p in faults)
        sides = sum(_has_side(p["ours"][name]) for p in faults) if values else "–"
        said = kinds["ours"][name]
        text = _over(said) if values else _bitwise(said)
        yield f"| rlk-align, {name} | {exact} of {len(faults)} | {sides} | {text} |"
    for task in TASKS:
        exact = sum(p["msprobe"][task]["exact"] for p in faults)
        text = _node(kinds["msprobe"][task])
        yield f"| msprobe, {task} | {exact} of {len(faults)} | – | {text} |"


def _has_side(said: Said) -> bool:
    return said["exact"] and not said["precheck"]


def _costs(report: Said) -> Iterator[str]:
    yield "| one pair, from nothing | wall | processor | kept of both sides | with the results |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, cost in report.get("costs", {}).items():
        sizes = " | ".join(f"{cost[size] / 1e6:.1f} MB" for size in ("sides", "all"))
        yield f"| {name} | {cost['wall']:.0f} s | {cost['processor']:.0f} s | {sizes} |"


def _pairs(report: Said) -> Iterator[str]:
    """The faults that some way does not name exactly; OUT.json has what each way answered."""
    yield _row(["pair", "planted in", "not named exactly by"])
    yield _row(["---"] * 3)
    for p in report["pairs"]:
        if p["site"] is not None and (ways := list(_misses(p))):
            yield _row([f"{p['rollout']}, {p['train']}", p["site"], ", ".join(ways)])


def _misses(pair: Said) -> Iterator[str]:
    for name, said in pair["ours"].items():
        if not said["bitwise_exact" if name == OURS[-1] else "exact"]:
            yield f"rlk-align by {name}"
    if pair["rollout"] == "vllm":
        yield "msprobe, which cannot pair two engines"
        return
    for task in TASKS:
        if not pair["msprobe"][task]["exact"]:
            yield f"msprobe by {task}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _over(said: Said) -> str:
    """The first operator over its budget, or what the precheck names."""
    if said["precheck"]:
        return "precheck, " + ", ".join(said["precheck"])
    over = said["over_budget"]
    text = f"{over[0][0]} of {over[0][1]}" if over else "none"
    return text + (f" (+{len(over) - 1})" if len(over) > 1 else "")


def _bitwise(said: Said) -> str:
    return ", ".join(said["precheck"]) or said["first_bitwise"] or "none"


def _node(said: Said) -> str:
    if said["node"] is None:
        return "none"
    within = f" in {said['module']}" if not said["node"].startswith("Module.") else ""
    return f"`{said['node']}`{within}"
