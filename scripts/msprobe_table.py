"""The tables of compare_msprobe.py's report, as Markdown."""

from collections.abc import Iterator
from typing import Any

OURS = ("all values", "500 KB of values", "digests alone")
TASKS = ("checksums", "statistics", "tensors")
PAIR = ("rollout", "train", "planted in")
ALIKE = "hf:attn=sdpa"
"""On both sides: the faults that are counted."""

Said = dict[str, Any]


def tables(report: Said) -> str:
    """What each names over all pairs, what one pair takes, and each pair by itself."""
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
        text = _over(said, None) if values else _bitwise(said, None)
        yield f"| rlk-align, {name} | {exact} of {len(faults)} | {sides} | {text} |"
    for task in TASKS:
        exact = sum(p["msprobe"][task]["exact"] for p in faults)
        text = _node(kinds["msprobe"][task], None)
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
    ours = ["rlk-align: first over budget", f"with {OURS[1]}", "first bitwise, digests alone"]
    yield _row([*PAIR, *ours, *(f"msprobe {task}" for task in TASKS)])
    yield _row(["---"] * (len(PAIR) + len(ours) + len(TASKS)))
    for p in report["pairs"]:
        cells = [p["rollout"], p["train"], p["site"] or "nothing"]
        cells += [_over(p["ours"].get(name), p["site"]) for name in OURS[:2]]
        cells.append(_bitwise(p["ours"].get(OURS[2]), p["site"]))
        for task in TASKS:
            across = p["rollout"] == "vllm"
            cells.append("cannot pair them" if across else _node(p["msprobe"][task], p["site"]))
        yield _row(cells)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mark(exact: bool, site: str | None) -> str:
    return "" if site is None else "**exact**: " if exact else "not exact: "


def _over(said: Said | None, site: str | None) -> str:
    if said is None:
        return ""
    if said["precheck"]:
        return _mark(said["exact"], site) + "precheck, " + ", ".join(said["precheck"])
    over = said["over_budget"]
    text = f"{over[0][0]} of {over[0][1]}" if over else "none"
    return _mark(said["exact"], site) + text + (f" (+{len(over) - 1})" if len(over) > 1 else "")


def _bitwise(said: Said | None, site: str | None) -> str:
    if said is None:
        return ""
    text = ", ".join(said["precheck"]) or said["first_bitwise"] or "none"
    return _mark(said["bitwise_exact"], site) + text


def _node(said: Said, site: str | None) -> str:
    if said["node"] is None:
        return _mark(False, site) + "none"
    within = f" in {said['module']}" if not said["node"].startswith("Module.") else ""
    return _mark(said["exact"], site) + f"`{said['node']}`{within}"
