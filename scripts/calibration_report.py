#!/usr/bin/env python3
"""What the built-in contracts' limits rest on: healthy runs, planted faults, and both errors.

    python scripts/calibration_report.py --runs bf16=runs/bf16 fp16=runs/fp16 fp32=runs/fp32 \\
        --selftest selftest.json --out tables.md

The runs are those of scripts/calibration_runs.py: RUNS/PAIR/SEED, or RUNS/PROCESSOR/PAIR/SEED. The
faults are those of `rlk-align selftest --output json=selftest.json`.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlk_align.cli.contract import healthy_run
from rlk_align.judge.calibrate import HealthyRun
from rlk_align.judge.checks import edge_value
from rlk_align.judge.contract import STATISTICS, Budget, Contract, Limit
from rlk_align.judge.load import open_contract
from rlk_align.judge.verdict import judge
from rlk_align.results import EdgeMetrics
from rlk_align.selftest.record import Detection, SelfTest


def runs_in(folder: Path) -> dict[str, list[HealthyRun]]:
    """Each pair of engines with its runs, of every processor and seed."""
    found = defaultdict(list)
    for sums in sorted(folder.rglob("checksums.json")):
        found[sums.parent.parent.name].append(healthy_run(str(sums.parent)))
    return dict(found)


def figures(runs: Sequence[HealthyRun], limit: Limit) -> list[float]:
    edges = [e for r in runs for e in r.comparison.edges]
    return [edge_value(limit, e.metrics)[0] for e in edges]


def limits_table(
    pairs: dict[str, list[HealthyRun]], contract: Contract, faults: Sequence[Detection]
) -> Iterator[str]:
    """The limits on tokens: for each pair the largest healthy value, then the false alarms and the
    faults that the limit alone would stop; and how much of the budgets healthy runs use."""
    runs = [r for some in pairs.values() for r in some]
    verdicts = [judge(r.comparison, contract) for r in runs]

    def alarms(limit_id: str) -> int:
        return sum(any(b.limit == limit_id for b in v.breaches) for v in verdicts)

    counts = [f"{len(r)} runs, {sum(x.comparison.tokens for x in r):,}" for r in pairs.values()]
    titles = [f"{pair} ({count} tokens)" for pair, count in zip(pairs, counts, strict=True)]
    head = " | ".join(titles)
    yield f"| limit | fails above | {head} | false alarms | faults that it stops alone |"
    yield "| --- | ---: |" + " ---: |" * len(pairs) + " ---: | ---: |"
    for limit in contract.limits:
        if limit.of_site:
            continue
        seen = share(sum(breaks(limit, f.metrics) for f in faults), faults)
        largest = " | ".join(f"{max(figures(r, limit), default=0.0):.2g}" for r in pairs.values())
        fails = f"{limit.fail:g}"
        if limit.tail is not None:
            fails = f"{limit.fail_at(2000):.3g} of 2,000 tokens"
        yield f"| {limit.id} | {fails} | {largest} | {alarms(limit.id)} | {seen} |"
    seen = sum(f.seen in ("named", "precheck") for f in faults)
    whole = sum(bool(v.breaches) for v in verdicts)
    blank = " |" * len(pairs)
    yield f"| **contract** | |{blank} **{whole} of {len(runs)}** | **{share(seen, faults)}** |"
    used = [f"{b.id} {most_used(runs, b)}" for b in contract.budgets]
    others = [*(b.id for b in contract.budgets), *(x.id for x in contract.limits if x.of_site)]
    alarmed = [f"{name} in {alarms(name)} runs" for name in others if alarms(name)]
    yield ""
    yield f"Largest share of each budget that healthy runs use: {', '.join(used)}."
    yield f"False alarms of limits on operators: {', '.join(alarmed) or 'none'}."


def most_used(runs: Sequence[HealthyRun], budget: Budget) -> str:
    """The statistic of a budget that healthy runs exhaust most, as `77% of rms`."""
    units = [
        u.errors
        for r in runs
        for u in r.comparison.referee
        if u.op in budget.ops and u.errors is not None
    ]
    used = {
        name: max((abs(getattr(u, name)) for u in units), default=0.0) / getattr(budget, name)
        for name in STATISTICS
        if getattr(budget, name)
    }
    most = max(used, key=lambda name: used[name])
    return f"{used[most]:.0%} of {most}"


def share(seen: int, faults: Sequence[Detection]) -> str:
    return f"{seen} of {len(faults)}" if faults else "–"


def breaks(limit: Limit, metrics: EdgeMetrics | None) -> bool:
    """Whether the limit of tokens alone would have stopped it, of however few tokens."""
    if metrics is None:
        return False
    value, low = edge_value(limit, metrics)
    return not abs(value if low is None else low) <= limit.fail_at(metrics.tokens)


def smallest_table(faults: Sequence[Detection]) -> Iterator[str]:
    """Of faults that have a strength: the smallest that is named, without a gap above it."""
    by_name: dict[str, list[Detection]] = defaultdict(list)
    for fault in faults:
        if fault.strength:
            by_name[fault.fault].append(fault)
    rows = []
    for name, points in sorted(by_name.items()):
        strengths = sorted({p.strength for p in points}, reverse=True)
        caught = []
        for strength in strengths:
            if not all(p.seen == "named" for p in points if p.strength == strength):
                break
            caught.append(strength)
        if len(strengths) < 2 or not caught:
            continue
        there = [p.metrics for p in points if p.strength == caught[-1] and p.metrics]
        moved = max((m.max_abs_dlogp for m in there), default=float("nan"))
        left = ", ".join(f"{s:g}" for s in strengths[len(caught) :]) or "none was planted"
        rows.append(f"| `{name}` | {caught[-1]:g} | {moved:.2g} | {left} |")
    if rows:
        yield "## The smallest fault that is named"
        yield ""
        yield "| fault | smallest that is named | its max abs Δlogp | weaker ones, not named |"
        yield "| --- | ---: | ---: | --- |"
        yield from rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="CONTRACT=FOLDER")
    parser.add_argument("--selftest", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    told = SelfTest.model_validate_json(options.selftest.read_text()) if options.selftest else None
    planted = [d for d in told.detections if d.expected == "named"] if told else []
    lines: list[str] = []
    for item in options.runs:
        name, _, folder = item.partition("=")
        contract, pairs = open_contract(name), runs_in(Path(folder))
        faults = [d for d in planted if not d.curve] if name == "bf16" else []
        lines += [f"## {contract.id} {contract.version}", ""]
        lines += [*limits_table(pairs, contract, faults), ""]
    lines += [*smallest_table(planted), ""]
    options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
