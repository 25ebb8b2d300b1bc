"""Explains simulated dumps, healthy ones and ones with planted faults, and writes what was named.

python scripts/sweep_dumps.py --out reports/dumps.json    prints the tables of reports/dumps.md
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from simulate_dumps import FAULTS, NOISE, faulty, healthy

from rlk_align.diagnose.contract import RunContract, load_run_contract
from rlk_align.diagnose.explain import explain
from rlk_align.dumps.sequences import Sequences

SIZES = (2_000, 20_000, 200_000)
SEEDS = 10
HEALTHY = {2_000: 50, 20_000: 30, 200_000: 10, 1_000_000: 2}
"""Size -> healthy runs in each dtype."""
CURVE = 20_000
"""The size at which smaller faults are planted."""


def answer(run: Sequences, contract: RunContract) -> str:
    """The diagnosis that is the verdict's, or the status where there is none."""
    explained = explain([run], contract)
    return explained.diagnoses[0].name if explained.diagnoses else explained.status


def cell(answers: Counter[str], wanted: str) -> str:
    """How often the fault got its own name, and which others it got."""
    others = ", ".join(f"{name} {n}" for name, n in answers.items() if name != wanted)
    return f"{answers[wanted]}{f' ({others})' if others else ''}"


def table(faults: dict[str, dict[str, Any]]) -> str:
    """The faults as a Markdown table."""
    lines = [f"| fault | diagnosis | {' | '.join(f'{s:,}' for s in SIZES)} | smallest named |"]
    lines.append("| --- | --- |" + " --- |" * (len(SIZES) + 1))
    for name, fault in faults.items():
        wanted = fault["diagnosis"]
        cells = [cell(answers, wanted) for answers in fault["sizes"].values()]
        named = [x for x, answers in fault["strengths"].items() if answers[wanted] == SEEDS]
        smallest = named[0] if named else "none"
        tried = len(fault["strengths"])
        curve = "–" if tried == 1 else f"{smallest} of {', '.join(fault['strengths'])}"
        lines.append(f"| {name} | {wanted} | {' | '.join(cells)} | {curve} |")
    return "\n".join(lines)


def main() -> None:
    """Runs all, writes the answers and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    contract, started = load_run_contract(), time.monotonic()
    record: dict[str, object] = {"contract": f"{contract.id} {contract.version}"}
    record["healthy"] = {
        f"{dtype} {size}": Counter(
            answer(healthy(1000 + seed, size, dtype, 1 + seed % 4), contract)
            for seed in range(count)
        )
        for size, count in HEALTHY.items()
        for dtype in NOISE
    }
    print(record["healthy"], flush=True)
    faults: dict[str, dict[str, Any]] = {}
    for name, fault in FAULTS.items():
        curve = {
            str(strength): Counter(
                answer(faulty(name, seed, CURVE, strength), contract) for seed in range(SEEDS)
            )
            for strength in fault.strengths
        }
        sizes = {
            str(size): Counter(answer(faulty(name, seed, size), contract) for seed in range(SEEDS))
            for size in SIZES
        }
        faults[name] = {"diagnosis": fault.diagnosis, "sizes": sizes, "strengths": curve}
    print(table(faults))
    record["faults"] = faults
    record["seconds"] = round(time.monotonic() - started)
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
