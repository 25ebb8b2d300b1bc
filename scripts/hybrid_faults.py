"""Plants each fault of hybrid layers in each engine, and writes the tables of `docs/hybrid.md`:
`python scripts/hybrid_faults.py [MODEL...]`.

A model's faults run in one `rlk-align selftest` of all engines of a line of `ENGINES`, on prompts
that are longer than several chunks. What each run found is in `reports/engines/hybrid-faults.json`;
named models replace their own entries there.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from family_models import family_model  # noqa: E402

from rlk_align.model.shape import read_shape  # noqa: E402
from rlk_align.model.sites import model_sites  # noqa: E402
from rlk_align.selftest.faults.catalogue import FAULTS, faults_of  # noqa: E402

FOUND = ROOT / "reports" / "engines" / "hybrid-faults.json"
PAGE = ROOT / "docs" / "hybrid.md"
BEGIN, END = "<!-- begin: scripts/hybrid_faults.py -->\n", "<!-- end -->\n"
TRAINED = {"qwen3_5_text": ROOT / "fixtures" / "hybrid"}
"""Family -> a trained model; of the others the model is random."""
OTHERWISE = {"granitemoehybrid": {"num_local_experts": 0}}
"""Family -> the settings of its random model in which it differs from that of the tests."""
ENGINES = {
    "": ("vllm", "hf", "fsdp:dp=2"),
    "two": ("vllm", "hf"),
    "kernels": ("vllm:kernels=rlk", "hf:kernels=rlk"),
}
FAMILIES = {"qwen3_5_text": ("", "kernels"), "granitemoehybrid": ("two",)}
"""Family -> its lines of `ENGINES`."""
LONGEST = {"qwen3_5_text": 200, "granitemoehybrid": 56}
"""The tokens of the longest prompt: more than three chunks."""
OF_HYBRIDS = ("recurrence", "state space")
"""The groups of the catalogue with these faults."""
SHOWN = ("engines", "rows", "left_out")
OF_DETECTION = (
    *("fault", "side", "rollout", "train", "expected", "planted", "seen", "found_site"),
    *("found_side", "words", "others"),
)


def model_of(family: str, folder: Path) -> Path:
    return TRAINED.get(family) or family_model(folder, family, **OTHERWISE.get(family, {}))


def faults_in(model: Path, kernels: bool) -> list[str]:
    """The faults of hybrid layers whose operators the model has; `kernels`: those beside them."""
    sites = {s.name: s for s in model_sites(read_shape(model))}
    fitting = [n for n, f in FAULTS.items() if of_hybrids(n) and f.fits(sites)]
    return [n for n in fitting if not (kernels and FAULTS[n].not_beside_kernels)]


def of_hybrids(name: str) -> bool:
    return FAULTS[name].op_class in OF_HYBRIDS


def write_prompts(path: Path, longest: int) -> Path:
    """Five prompts, of which the shortest has 0.6 of the tokens of the longest."""
    lengths = [round(longest * (0.6 + 0.1 * n)) for n in range(5)]
    rows = [
        {"id": f"p{n}", "ids": [1 + (7 * n + 31 * i) % 1000 for i in range(length)]}
        for n, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def planted(family: str, engines: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a self-test of these engines finds."""
    model, output = model_of(family, folder), folder / "selftest.json"
    output.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlk_align", "selftest", "--model", str(model)),
            *(
                "--engines",
                ",".join(engines),
                "--faults",
                ",".join(faults_in(model, "kernels" in engines[0])),
            ),
            *("--seeds", "1", "--no-curves", "--output", f"json={output}"),
            *("--prompts", str(write_prompts(folder / "prompts.jsonl", LONGEST[family]))),
            *("--run-dir", str(folder / "-".join([family, *engines]).replace(":", "-"))),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    if not output.exists():
        raise SystemExit(f"{family}, {engines}: {done.stderr[-2000:]}")
    report = json.loads(output.read_text())
    return {
        **{name: report[name] for name in SHOWN},
        "alarms": [alarm for pair in report["clean"] for alarm in pair["alarms"]],
        "clean_pairs": len(report["clean"]),
        "detections": [{name: d[name] for name in OF_DETECTION} for d in report["detections"]],
    }


def table(run: Mapping[str, Any]) -> Iterator[str]:
    """A row for each fault, and a column for each engine."""
    engines = sorted(run["engines"])
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for found in run["detections"]:
        engine = found["rollout" if found["side"] == "rollout" else "train"].partition(":")[0]
        cells[found["fault"], engine].append(found)
    yield "| fault | " + " | ".join(f"`{e}`" for e in engines) + " |"
    yield "| --- |" + " --- |" * len(engines)
    for fault in dict.fromkeys(name for name, _ in cells):
        row = []
        for engine in engines:
            name = engine.partition(":")[0]
            row.append(cell(fault, name, cells.get((fault, name), []), run["left_out"]))
        yield f"| `{fault}` | {' | '.join(row)} |"


def cell(fault: str, engine: str, found: Sequence[Mapping[str, Any]], left_out: list[str]) -> str:
    """What a cell says of one fault in one engine, in all pairs of the engine."""
    if not found:
        why = next((x for x in left_out if x.startswith(f"{fault} in {engine}")), "")
        return f"left out: {why}" if why else absent(fault, engine)
    said = []
    for one in found:
        if not as_expected(one):
            beside = [str(one["found_site"]), *one["others"]]
            said.append(f"**{one['seen']}**: {', '.join(beside)}")
        elif one["seen"] == "within budget":
            said.append("within its budget")
        else:
            site = str(one["found_site"]).rpartition(".")[2]
            said.append(f"`{site}`: {one['words'].rpartition('errors of ')[2]}")
    return "; ".join(dict.fromkeys(said))


def absent(fault: str, engine: str) -> str:
    """Why no run has this fault in this engine."""
    if FAULTS[fault].decode:
        return "it only scores here"
    if fault not in faults_of(engine):
        return "it restores no state"
    return "**not run**"


TITLES = {
    ("qwen3_5_text", ""): "Gated delta nets, `fixtures/hybrid`, without the kernels",
    ("qwen3_5_text", "kernels"): "The same, with the kernels in both engines",
    ("granitemoehybrid", "two"): "State-space models, a random dense `granitemoehybrid`",
}


def section(found: Mapping[str, Any]) -> str:
    """The part of the page between its two marks."""
    lines = []
    for (family, which), title in TITLES.items():
        run = found.get(f"{family} {which}".strip())
        if run is None:
            continue
        versions = ", ".join(
            f"{e.partition(':')[0]} {v}" for e, v in sorted(run["engines"].items())
        )
        right = sum(map(as_expected, run["detections"]))
        lines += [
            f"{title} ({versions}; {run['rows']:,} rows):",
            "",
            *table(run),
            "",
            f"{right} of {len(run['detections'])} comparisons found what is expected. Alarms in "
            f"the same pairs without a fault: {len(run['alarms'])} in {run['clean_pairs']}.",
            "",
        ]
    return "\n".join(lines)


def as_expected(found: Mapping[str, Any]) -> bool:
    """Whether a comparison names the fault at its operator and side, or leaves a rounding within
    its budget."""
    fault = FAULTS[found["fault"]]
    if {*found["others"]} - {f"{site} of {found['side']}" for site in fault.also_at}:
        return False
    if found["seen"] == "within budget":
        return bool(found["expected"] == "rounding")
    named = (found["found_site"], found["found_side"]) == (fault.site, found["side"])
    return bool(found["seen"] == "named" and named)


def page(found: Mapping[str, Any]) -> str:
    """The whole page, with the present tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} lacks the marks {BEGIN!r} and {END!r}"
    return f"{before}{BEGIN}\n{section(found)}{END}{after}"


def main(families: list[str]) -> None:
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for family in families or FAMILIES:
            for which in FAMILIES[family]:
                run = planted(family, ENGINES[which], Path(scratch))
                found[f"{family} {which}".strip()] = run
                print(family, which, len(run["detections"]), flush=True)
                FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
