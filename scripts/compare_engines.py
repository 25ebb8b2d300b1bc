"""Compares every rollout engine with every training engine, and writes one table.

    python scripts/compare_engines.py --rollout vllm --train hf --train megatron:tp=2 \\
        --dtype bfloat16 --dtype float32 --out reports/engines/engines-cpu [-- FLAGS OF compare]

Each pair is one `rlk-align compare`. Pairs share captures, so each engine runs once for each dtype.
The script writes OUT.json and prints a table: verdict, coverage, log-prob differences, the
operators that introduced a difference, wall time, bytes of the trace, and the peak memory of the
parent and of an engine's largest process.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from rlk_align.engines.spec import EngineSpec
from rlk_align.results import Comparison, EdgeResult

EDGE = "prefill_vs_train"
_MEASURED = """
import resource, sys
from rlk_align.cli.main import main
try: main()
finally:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    print("peak", *(resource.getrusage(k).ru_maxrss for k in kinds), file=sys.stderr)
"""


def with_dtype(spec: str, dtype: str) -> str:
    """The spec with this dtype, unless the spec names a dtype."""
    parsed = EngineSpec.parse(spec)
    return str(EngineSpec(parsed.name, {"dtype": dtype, **parsed.options}))


def run(rollout: str, train: str, folder: Path, flags: list[str]) -> dict:
    """Runs `rlk-align compare`; its verdict, and the time and memory that it needed."""
    output = folder / "verdict-of-pair.json"
    output.unlink(missing_ok=True)
    words = ["compare", "--rollout", rollout, "--train", train, "--run-dir", folder, *flags]
    words += ["--output", f"json={output}"]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *map(str, words)],
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - started
    print(done.stdout, *done.stderr.splitlines()[-30:], sep="\n", flush=True)
    result = {"rollout": rollout, "train": train, "exit": done.returncode, "seconds": seconds}
    if not output.is_file():
        return result | {"error": done.stderr.splitlines()[-3:]}
    peaks = next(line for line in done.stderr.splitlines() if line.startswith("peak ")).split()
    verdict = json.loads(output.read_text())
    comparison = Comparison.model_validate_json((folder / "comparison.json").read_text())
    captures = json.loads((folder / "run.json").read_text())["captures"]
    return result | {
        "verdict": verdict,
        "introducers": introducers(comparison),
        "captures": {role: passes(folder / name) for role, name in captures.items()},
        "parent_peak_bytes": int(peaks[1]) * 1024,
        "process_peak_bytes": int(peaks[2]) * 1024,
    }


def introducers(comparison: Comparison) -> dict[str, int]:
    """Operator -> the number of rows in which it introduced a difference, over all layers, in model
    order."""
    edge = next((e for e in comparison.edges if e.name == EDGE), None)
    rows: Counter[str] = Counter()
    for site in edge.sites if isinstance(edge, EdgeResult) else ():
        if site.introduced:
            rows[site.op] += site.introduced
    return dict(rows)


def passes(folder: Path) -> list[dict]:
    """The seconds and the bytes on disk of each pass of a capture."""
    records = []
    for path in sorted(folder.glob("*/pass.json")):
        record = json.loads(path.read_text())
        size = sum(f["size"] for f in record["files"].values())
        records.append({"pass": path.parent.name, "seconds": record["seconds"], "bytes": size})
    return records


def table(report: dict) -> str:
    """The printed table. OUT.json also has the seconds and bytes of each capture's passes."""
    verdicts = [r["verdict"] for r in report["runs"] if "verdict" in r]
    contracts = {f"{v['contract']['id']} {v['contract']['version']}" for v in verdicts}
    lines = [
        f"# {report['title']}",
        "",
        f"{report['machine']}. Contract: {', '.join(sorted(contracts))}.",
        "",
        "```",
        report["command"],
        "```",
        "",
        f"Differences are those of `{EDGE}`. An introducer is an operator with equal inputs and "
        "different outputs, and its number is that of such rows. Memory is that of the parent and "
        "of an engine's largest process.",
        "",
        "| rollout | train | verdict | rows paired | max, mean abs Δ | first introducer "
        "| introducers (rows) | wall, trace, memory |",
        "| --- | --- | --- | ---: | ---: | --- | --- | ---: |",
    ]
    for r in report["runs"]:
        if "verdict" not in r:
            lines.append(f"| {r['rollout']} | {r['train']} | exit {r['exit']} |" + " |" * 5)
            continue
        lines.append("| " + " | ".join(_cells(r)) + " |")
    return "\n".join([*lines, ""])


def _cells(r: dict) -> list[str]:
    v = r["verdict"]
    edge = v["edges"].get(EDGE, {})
    coverage, first = v["coverage"], (v["divergence"] or {}).get("first_bitwise")
    size = sum(p["bytes"] for records in r["captures"].values() for p in records)
    memory = (r["parent_peak_bytes"], r["process_peak_bytes"])
    breached = ", ".join(dict.fromkeys(b["limit"] for b in v["breaches"]))
    return [
        r["rollout"],
        r["train"],
        v["status"] + (f" ({breached})" if breached else ""),
        f"{coverage['paired']:,} of {coverage['expected']:,}" if coverage else "",
        ", ".join(f"{edge[k]:.2g}" for k in ("max_abs_dlogp", "mean_abs_dlogp")) if edge else "",
        first["site"] if first else "none",
        ", ".join(f"{op} {rows:,}" for op, rows in r["introducers"].items()),
        f"{r['seconds']:.0f} s, {size / 1e9:.2f} GB, "
        + " / ".join(f"{m / 1e9:.1f} GB" for m in memory),
    ]


def machine() -> str:
    name = f"{os.cpu_count()} CPU cores, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {name}"
    return f"{name}, python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollout", action="append", required=True)
    parser.add_argument("--train", action="append", required=True)
    parser.add_argument("--dtype", action="append", help="default: the specs' own")
    parser.add_argument("--title", default="Engines compared")
    parser.add_argument("--folder", type=Path, help="of the captures; default: a temporary one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="of `rlk-align compare`")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for dtype in args.dtype or [None]:
            for rollout in args.rollout:
                for train in args.train:
                    specs = (rollout, train)
                    if dtype is not None:
                        specs = tuple(with_dtype(s, dtype) for s in specs)
                    runs.append(run(*specs, folder, args.flags))
    command = " ".join(["python", *sys.argv])
    report = {"title": args.title, "machine": machine(), "command": command, "runs": runs}
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
