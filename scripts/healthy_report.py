#!/usr/bin/env python3
"""Summarises healthy runs of many models, and judges them by the contracts.

    python scripts/healthy_report.py --models models --runs runs --out table.md
    python scripts/healthy_report.py ... --contracts bf16=new/bf16.toml --by dtype,hidden dtype,pair

scripts/healthy_runs.py makes the runs. `table.md` has a table for each `--by`, with a row for each
group; `table.json` has every run. Δ is the log-prob of the trainer minus that of the rollout.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlk_align.compare.metrics import edge_metrics
from rlk_align.errors import ContractError
from rlk_align.judge.budgets import bounds_of, budget_of
from rlk_align.judge.contract import STATISTICS, Contract
from rlk_align.judge.load import BY_DTYPE, open_contract
from rlk_align.judge.verdict import judge
from rlk_align.results import Comparison, Controls, EdgeResult
from rlk_align.trace.run import Run

EDGE = "decode_vs_train"
AXES = ["family", "hidden", "layers", "head_dim", "vocabulary", "tied", "stored", "steps"]
"""The properties of a model that a table may be grouped by, besides `model`, `dtype`, `processor`
and `pair`."""
RANGES = {
    "hidden": (128, 512),
    "layers": (4, 12),
    "head_dim": (16, 64),
    "vocabulary": (4096, 32000),
    "steps": (0, 200),
}
"""Axes that tables group by ranges: up to the first number, up to the second, and above."""
TABLES = ("dtype,pair", "dtype,processor", *(f"dtype,{axis}" for axis in RANGES))
Record = dict[str, Any]


def summarize(folder: Path, models: Path, contracts: dict[str, Contract]) -> Record:
    """The record of one run: its position on the axes, its figures and its verdict."""
    model, setting, pair, seed = folder.parts[-4:]
    dtype, _, processor = setting.partition("-")
    made = json.loads((models / model / "made.json").read_text())
    run = Run.open(str(folder))
    comparison = measured_again(run)
    contract = contracts[dtype]
    return {
        "model": model,
        "dtype": dtype,
        "processor": processor,
        "pair": pair,
        "seed": int(seed),
        **{axis: made[axis] for axis in (*AXES, "held_out_loss", "median_top_logit")},
        **figures(run),
        "shares": shares(comparison, contract),
        **verdict_of(comparison, contract),
        "precheck": [f"{m.kind} {m.name}: {m.detail}" for m in comparison.mismatches],
    }


def logprobs(run: Run, edge: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each sampled token the log-probs of both passes, and the number of its sequence."""
    rows = run.rows(["edge", "sample", "first_logprob", "second_logprob"]).drop_null()
    on_edge = np.array(rows["edge"].to_pylist()) == edge
    first, second, sample = (
        rows[n].to_numpy()[on_edge] for n in ("first_logprob", "second_logprob", "sample")
    )
    return first, second, sample


def measured_again(run: Run) -> Comparison:
    """The run's comparison, whose metrics of log-probs are computed anew by the present code."""
    comparison = run.comparison
    edges = [
        e.model_copy(update={"metrics": edge_metrics(*logprobs(run, e.name))})
        for e in comparison.edges
    ]
    return comparison.model_copy(update={"edges": edges})


def edge_of(run: Run, name: str) -> EdgeResult:
    return next(edge for edge in run.comparison.edges if edge.name == name)


def figures(run: Run) -> Record:
    """Sums over the sampled tokens, which can be added up over a group of runs."""
    first, second, _ = logprobs(run, EDGE)
    shift = second - first
    return {
        "tokens": len(shift),
        "sum_abs_dlogp": float(np.abs(shift).sum()),
        "sum_1_minus_p": float(-np.expm1(first).sum()),
        "max_abs_dlogp": float(np.abs(shift).max(initial=0.0)),
        "cached_rows": edge_of(run, EDGE).cached_rows,
        "sum_ratio_minus_1": float(np.expm1(shift).sum()),
        "sum_k3": float((np.expm1(shift) - shift).sum()),
    }


def shares(comparison: Comparison, contract: Contract) -> dict[str, Record]:
    """Budget -> the statistic that uses the largest share of it, and its site, side and pass."""
    most: dict[str, Record] = {}
    for unit in comparison.referee:
        budget, bounds = budget_of(contract, unit), bounds_of(contract, unit)
        if budget is None or bounds is None or unit.errors is None:
            continue
        for name in STATISTICS:
            value, limit = abs(getattr(unit.errors, name)), bounds[name]
            share = value / limit if limit else float("inf") if value else 0.0
            if not share <= most.get(budget.id, {"share": -1.0})["share"]:
                most[budget.id] = {
                    "share": share,
                    "statistic": name,
                    "site": unit.site,
                    "side": unit.side,
                    "pass": unit.passname,
                }
    return most


def verdict_of(comparison: Comparison, contract: Contract) -> Record:
    """The verdict of a run. If it has no control passes, it is judged as if each side repeated
    itself and the taps changed nothing."""
    controls = comparison.controls
    if controls is not None and set(controls.noise.values()) == {"not measured"}:
        repeated = Controls(
            observer="bitwise", observer_detail=[], noise=dict.fromkeys(controls.noise)
        )
        comparison = comparison.model_copy(update={"controls": repeated})
    try:
        verdict = judge(comparison, contract)
    except ContractError as error:
        return {"status": "refused", "breaches": [], "alike": [], "doubts": [error.message]}
    beyond: dict[str, list[Record]] = {"fail": [], "alike": []}
    for check in verdict.checks:
        if check.outcome in beyond:
            fields = {"limit", "metric", "site", "edge", "side", "value", "fail"}
            record = check.model_dump(include=fields)
            beyond[check.outcome].append({**record, "excess": check.excess})
    return {
        "status": verdict.status,
        "breaches": beyond["fail"],
        "alike": beyond["alike"],
        "doubts": verdict.doubts,
    }


def short(run: Record) -> Record:
    """The record of one run for `reports/`."""
    tokens = run["tokens"]
    return {
        **{axis: run[axis] for axis in ("model", "dtype", "processor", "pair", "tokens")},
        "cached_rows": run["cached_rows"],
        "c": ratio(run["sum_abs_dlogp"], run["sum_1_minus_p"]),
        "mean": ratio(run["sum_abs_dlogp"], tokens),
        "max": run["max_abs_dlogp"],
        "bias": ratio(run["sum_ratio_minus_1"], tokens),
        "k3": ratio(run["sum_k3"], tokens),
        "share": {k.removeprefix("rounding-"): x["share"] for k, x in run["shares"].items()},
        "status": run["status"],
        "alarms": [f"{b['limit']} {b['site'] or b['edge']}" for b in run["breaches"]],
        "precheck": run["precheck"],
    }


def rounded(record: Record) -> str:
    """A record as JSON, whose numbers have six digits."""
    return json.dumps(
        json.loads(json.dumps(record), parse_float=lambda x: float(f"{float(x):.6g}"))
    )


def table(runs: Sequence[Record], by: Sequence[str]) -> Iterator[str]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for run in runs:
        groups[tuple(group_of(axis, run[axis]) for axis in by)].append(run)
    budgets = sorted({b for run in runs for b, used in run["shares"].items() if used["share"]})
    titles = [b.removeprefix("rounding-") for b in budgets]
    head = ["runs", "tokens", "c", "c-max", "mean-Δ", "max-Δ", "E[ρ]−1", "k3"]
    yield "| " + " | ".join([*by, *head, *titles, "pass/fail/?", "breached"]) + " |"
    numeric = " ---: |" * (len(head) + len(titles) + 1)
    yield "|" + " --- |" * len(by) + numeric + " --- |"
    for key, some in sorted(groups.items()):
        cells = [
            *(name for _, name in key),
            *measures(some),
            *(most_used(some, b) for b in budgets),
        ]
        yield "| " + " | ".join([*cells, statuses(some), breached(some)]) + " |"


def group_of(axis: str, value: Any) -> tuple[Any, str]:
    """(sort key, name) of the range that contains a value; the value itself on an axis without
    ranges."""
    if axis not in RANGES:
        return value, str(value)
    low, high = RANGES[axis]
    if value > high:
        return 2, f"above {high}"
    return (1, f"to {high}") if value > low else (0, f"to {low}")


def most_used(some: Sequence[Record], budget: str) -> str:
    used = [r["shares"][budget]["share"] for r in some if budget in r["shares"]]
    return f"{max(used):.0%}" if used else "–"


def measures(some: Sequence[Record]) -> list[str]:
    def total(name: str) -> float:
        return sum(r[name] for r in some)

    tokens = total("tokens")
    worst = np.max([ratio(r["sum_abs_dlogp"], r["sum_1_minus_p"]) for r in some])
    return [
        str(len(some)),
        f"{tokens:,}",
        f"{ratio(total('sum_abs_dlogp'), total('sum_1_minus_p')):.2g}",
        f"{worst:.2g}",
        f"{ratio(total('sum_abs_dlogp'), tokens):.2g}",
        f"{np.max([r['max_abs_dlogp'] for r in some]):.2g}",
        f"{ratio(total('sum_ratio_minus_1'), tokens):.1e}",
        f"{ratio(total('sum_k3'), tokens):.1e}",
    ]


def ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def statuses(some: Sequence[Record]) -> str:
    count = Counter(r["status"] for r in some)
    return f"{count['pass']}/{count['fail']}/{len(some) - count['pass'] - count['fail']}"


def breached(some: Sequence[Record]) -> str:
    """Limits with the number of runs that exceed them; the number of runs whose two sides exceed a
    limit alike; and the number of runs that the precheck stops."""
    count = Counter(limit for r in some for limit in {b["limit"] for b in r["breaches"]})
    for name in ("alike", "precheck"):
        count[name] = sum(bool(r[name]) for r in some)
    return ", ".join(f"{name} {n}" for name, n in count.most_common() if n) or "–"


def alarms(runs: Sequence[Record]) -> Iterator[str]:
    """A table of the statistics that healthy runs exceed, by operator: in how many runs, and by how
    much."""
    groups: dict[tuple[str, ...], list[tuple[float, Record, Record]]] = defaultdict(list)
    for run in runs:
        for kind in ("breaches", "alike"):
            for check in run[kind]:
                operator = (check["site"] or "tokens").rpartition(".")[2]
                key = (run["dtype"], check["metric"], operator, kind)
                groups[key].append((check["excess"], run, check))
    if not groups:
        return
    yield "## Alarms"
    yield ""
    yield "| dtype | statistic | operator | | runs | largest / limit | that is |"
    yield "| --- | --- | --- | --- | ---: | ---: | --- |"
    for key, some in sorted(groups.items()):
        excess, run, check = max(some, key=lambda each: each[0])
        count = len({id(run) for _, run, _ in some})
        whose = f"{check['value']:.3g} of {check['fail']:.3g}, {check['site'] or check['edge']}"
        where = f"{run['model']}, {run['pair']}, {run['processor']}, {check['side'] or 'both'}"
        yield f"| {' | '.join(key)} | {count} | {excess:.2f} | {whose}; {where} |"
    yield ""


def skips(folder: Path) -> Iterator[str]:
    reasons: Counter[tuple[str, str]] = Counter()
    for path in sorted(folder.glob("*/*/*/skipped.json")):
        reasons[path.parent.name, json.loads(path.read_text())["reason"]] += 1
    if reasons:
        yield "## Pairs that were left out"
        yield ""
        for (pair, reason), count in reasons.most_common():
            yield f"- {pair}, {count} times: {' '.join(reason.split())}"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contracts", nargs="+", default=[], metavar="BUILT-IN=FILE")
    parser.add_argument("--by", nargs="+", default=TABLES, help="axes, joined by commas")
    parser.add_argument("--short", type=Path, help="a file with a line of JSON for each run")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    other = dict(text.split("=", 1) for text in options.contracts)
    contracts = {d: open_contract(other.get(name, name)) for d, name in BY_DTYPE.items()}
    folders = [path.parent for path in sorted(options.runs.glob("*/*/*/*/checksums.json"))]
    one = partial(summarize, models=options.models, contracts=contracts)
    with ProcessPoolExecutor(options.workers) as pool:
        runs = list(pool.map(one, folders, chunksize=8))
    lines = [f"# {len(runs)} healthy runs of {len({r['model'] for r in runs})} models", ""]
    for by in options.by:
        lines += [f"## By {by.replace(',', ' and ')}", "", *table(runs, by.split(",")), ""]
    lines += [*alarms(runs), *skips(options.runs)]
    options.out.write_text("\n".join(lines))
    options.out.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    if options.short:
        options.short.write_text("[\n" + ",\n".join(rounded(short(r)) for r in runs) + "\n]\n")


if __name__ == "__main__":
    main()
