"""Runs `explain` on healthy dumps and on dumps with planted faults, and counts its diagnoses.

    python scripts/sweep_dumps.py --out reports/dumps.json [--first-seed N] [--recorded RUN]...

The script writes the counts to OUT and prints them as tables. Seeds start at N, because results on
the seeds that the diagnoses were tuned on would be too good. RUN is a run of `rlk-align compare`
that recorded the logits (`recorded_dumps.py`).
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from fault_variants import INSTEAD, LESS, VARIANTS, variant, with_less
from recorded_dumps import RecordedDump, Recording, planted
from simulate_dumps import FAULTS, NOISE, faulty, healthy

from rlk_align.logs.diagnose.contract import RunContract, load_run_contract
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.dumps.sequences import Sequences

SIZES = (2_000, 20_000, 200_000)
SEEDS = 10
HEALTHY = {2_000: 100, 20_000: 40, 200_000: 10, 1_000_000: 2}
"""Size -> healthy runs in each dtype."""
CURVE = 20_000
"""The size at which weaker faults and unseen faults are planted."""
FEW = 5
"""Seeds for unseen faults, for dumps that leave out fields, and for recorded noise."""
Answers = Counter[str]


def answer(run: Sequences, contract: RunContract) -> str:
    """The first diagnosis, or the status if there is no diagnosis."""
    explained = explain([run], contract)
    return explained.diagnoses[0].name if explained.diagnoses else explained.status


def cell(answers: Answers, wanted: str) -> str:
    """How often the fault was diagnosed correctly, and its other diagnoses."""
    others = ", ".join(f"{name} {n}" for name, n in answers.most_common() if name != wanted)
    return f"{answers[wanted]}{f' ({others})' if others else ''}"


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def healthy_table(found: dict[str, dict[str, Answers]]) -> str:
    """How many runs are diagnosed as `numerics`, by dtype and size."""
    rows = (
        [dtype, *(f"{a['numerics']} of {a.total()}" for a in sizes.values())]
        for dtype, sizes in found.items()
    )
    return markdown(["dtype", *(f"{s:,}" for s in HEALTHY)], rows)


def fault_table(faults: dict[str, dict[str, Any]]) -> str:
    """A list, by diagnosis, of the faults that are diagnosed in every run at their greatest
    strength, each with the smallest strength that is always diagnosed; then a table of the other
    faults."""
    always: dict[str, list[str]] = {}
    rows = []
    for name, fault in faults.items():
        wanted, strengths = fault["diagnosis"], fault["strengths"]
        answers = [Answers(a) for a in fault["sizes"].values()]
        named = [x for x, a in strengths.items() if a.get(wanted) == SEEDS]
        smallest = (named[0] if named else "none") if len(strengths) > 1 else "–"
        if all(a[wanted] == a.total() for a in answers):
            shown = name if smallest == "–" else f"{name} ({smallest})"
            always.setdefault(wanted, []).append(shown)
        else:
            rows.append([name, wanted, ", ".join(cell(a, wanted) for a in answers), smallest])
    items = "".join(f"- `{d}`: {', '.join(names)}\n" for d, names in always.items())
    sizes = ", ".join(f"{s:,}" for s in SIZES)
    head = ["fault", "diagnosis", f"named at {sizes} tokens", "smallest"]
    return f"{items}\n{markdown(head, rows)}"


def recorded_table(record: dict[str, Any], names: list[str]) -> str:
    """By recording: healthy runs, and the faults that are not always diagnosed correctly."""
    rows = [["healthy"]]
    for name in names:
        sound = Answers(record[name]["healthy"])
        rows[0].append(f"{cell(sound, 'numerics')} of {sound.total()}")
    for fault, first in record[names[0]]["faults"].items():
        answers = [Answers(record[name]["faults"][fault]["answers"]) for name in names]
        wanted = first["diagnosis"]
        if any(a[wanted] < a.total() for a in answers):
            rows.append([f"{fault} (`{wanted}`)", *(cell(a, wanted) for a in answers)])
    others = len(record[names[0]]["faults"]) - len(rows) + 1
    return (
        markdown(["", *names], rows)
        + f"\nThe other {others} faults are always diagnosed correctly.\n"
    )


def missed_table(found: dict[str, dict[str, Any]]) -> str:
    """The faults that are not always diagnosed correctly."""
    rows = [
        [name, fault["diagnosis"], cell(answers, fault["diagnosis"])]
        for name, fault in found.items()
        if (answers := Answers(fault["answers"]))[fault["diagnosis"]] < answers.total()
    ]
    rest = f"The other {len(found) - len(rows)} of {len(found)} are always diagnosed correctly.\n"
    return markdown(["fault", "diagnosis", "named"], rows) + "\n" + rest


class Sweep:
    """Many runs, explained by one contract."""

    def __init__(self, first_seed: int) -> None:
        self.contract, self.first_seed = load_run_contract(), first_seed

    def ask(self, make: Callable[[int], Sequences], seeds: Iterable[int]) -> Answers:
        """The diagnoses of one run for each seed; `seeds` are added to the first seed."""
        return Counter(answer(make(self.first_seed + seed), self.contract) for seed in seeds)

    def healthy(self) -> dict[str, dict[str, Answers]]:
        """Dtype -> size -> diagnoses."""

        def of(dtype: str, size: int, count: int) -> Answers:
            return self.ask(lambda s: healthy(s, size, dtype, 1 + s % 4), range(count))

        return {
            dtype: {str(size): of(dtype, size, count) for size, count in HEALTHY.items()}
            for dtype in NOISE
        }

    def fault(self, name: str) -> dict[str, Any]:
        """A fault's diagnoses by size, at its greatest strength, and by strength."""

        def of(size: int, strength: float) -> Answers:
            return self.ask(lambda s: faulty(name, s, size, strength), range(SEEDS))

        fault = FAULTS[name]
        sizes = {str(size): of(size, fault.strengths[-1]) for size in SIZES}
        strengths = {str(x): of(CURVE, x) for x in fault.strengths}
        return {"diagnosis": fault.diagnosis, "sizes": sizes, "strengths": strengths}

    def unseen(self, size: int) -> dict[str, dict[str, Any]]:
        """Faults that the diagnoses were not tuned on."""
        return {
            name: {
                "diagnosis": fault.diagnosis,
                "answers": self.ask(lambda s, n=name: variant(n, s, size), range(FEW)),
            }
            for name, fault in VARIANTS.items()
        }

    def less(self) -> dict[str, dict[str, Any]]:
        """Every fault in dumps that leave out fields."""
        return {
            f"{name}, {what}": {
                "diagnosis": INSTEAD.get((what, name), fault.diagnosis),
                "answers": self.ask(
                    lambda s, w=what, n=name: with_less(w, n, s, CURVE), range(FEW)
                ),
            }
            for what in LESS
            for name, fault in FAULTS.items()
        }

    def recorded(self, folder: Path) -> dict[str, Any]:
        """Healthy runs and all faults, with the noise of real engines."""
        recording = Recording(folder)

        def sound(seed: int) -> Sequences:
            resample = seed > self.first_seed
            return RecordedDump(recording, seed, resample, 1 + seed % 4).sequences_of()

        faults = {
            name: {
                "diagnosis": fault.diagnosis,
                "answers": self.ask(lambda s, n=name: planted(recording, n, s), range(FEW)),
            }
            for name, fault in FAULTS.items()
        }
        return {"healthy": self.ask(sound, range(SEEDS)), "faults": faults}


def main() -> None:
    """Makes and explains all dumps, prints the tables and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--recorded", type=Path, action="append", default=[])
    asked = parser.parse_args()
    sweep, started = Sweep(asked.first_seed), time.monotonic()
    record: dict[str, Any] = {
        "contract": f"{sweep.contract.id} {sweep.contract.version}",
        "first_seed": asked.first_seed,
    }
    record["healthy"] = sweep.healthy()
    print("### Healthy runs\n\n" + healthy_table(record["healthy"]), flush=True)
    record["faults"] = {name: sweep.fault(name) for name in FAULTS}
    print("### Planted faults\n\n" + fault_table(record["faults"]), flush=True)
    for size in SIZES[:2]:
        record[f"unseen {size}"] = found = sweep.unseen(size)
        print(f"### Unseen faults, {size:,} tokens\n\n" + missed_table(found), flush=True)
    record["less"] = sweep.less()
    print(f"### Dumps that say less, {CURVE:,} tokens\n\n" + missed_table(record["less"]))
    for folder in asked.recorded:
        record[folder.name] = sweep.recorded(folder)
    if names := [folder.name for folder in asked.recorded]:
        print("### Noise of real engines\n\n" + recorded_table(record, names), flush=True)
    record["seconds"] = round(time.monotonic() - started)
    asked.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
