"""Planted faults between two HF sides: what rlk-align names, and what msprobe names.

    pip install mindstudio-probe
    python scripts/compare_msprobe.py --out reports/msprobe

Both tools see the same models, the same token ids and the same faults, of the catalogue
that `rlk-align selftest` plants. Writes OUT.json and OUT-tables.md. How an answer of
msprobe is read is said in `reports/msprobe.md`.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msprobe_side
from compare_engines import machine
from msprobe_side import ANALYSIS, TASKS, Side, compare_command, size_of
from msprobe_table import OURS, tables

from rlk_align.capture.capture import capture_each
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.data import data_path
from rlk_align.engines.spec import EngineSpec
from rlk_align.judge.verdict import over_budget
from rlk_align.model.checkpoint import default_model
from rlk_align.model.prompts import TokenBatch, load_prompts, save_prompts
from rlk_align.selftest.detect import verdict_of
from rlk_align.selftest.faults.catalogue import FAULTS
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

PLANTED = (
    *("embed-scaled", "norm-statistics-bf16", "rope-key-position", "attn-scale"),
    *("kv-int8", "proj-gain", "proj-channel-shift", "act-beta", "residual-branch"),
    *("logits-fp8", "logprob-temperature", "weight-element"),
)
"""At least one of every class that a prefill on HF shows; both sides have sdpa's attention."""
PLANTED_ACROSS = ("proj-gain",)
"""Seen with eager against sdpa, and with vLLM against Megatron, too."""
BUDGETS = dict(zip(OURS, (8 * 10**9, 500_000, 1), strict=True))
"""Bytes of values that a side may keep."""
PROMPTS, NEW_TOKENS = 2, 16
TIMED, TIMES = "proj-gain", 2
RLK = [sys.executable, "-m", "rlk_align"]


@dataclass(slots=True)
class Pair:
    """What both tools say of one pair."""

    rollout: str
    train: str
    fault: str | None
    site: str | None
    ours: dict[str, dict[str, Any]] = field(default_factory=dict)
    msprobe: dict[str, dict[str, Any]] = field(default_factory=dict)


def quiet(_stage: str, _done: int, _total: int) -> None:
    """Captures are many, and short."""


def captures(specs: list[str], prompts: Path, tokens: Path, run: Run, budget: int) -> list[Trace]:
    """Each scores the same tokens; those of one engine and its options share a process."""
    requests = [
        CaptureRequest(
            engine=EngineSpec.parse(spec),
            model=default_model(),
            prompts=prompts,
            max_new_tokens=NEW_TOKENS,
            passes=("prefill",),
            controls=False,
            trace=TracePlan(budget=budget),
        )
        for spec in specs
    ]
    return capture_each(requests, "train", run, [tokens] * len(specs), quiet)


def we_say(clean: Trace, faulty: Trace, site: str | None) -> dict[str, Any]:
    """What rlk-align names in a pair: a mismatch of the precheck, or operators."""
    verdict = verdict_of(clean, faulty, "prefill_vs_train", quiet)
    size = sum(size_of(t.folder) for t in (clean, faulty))
    mismatches = [f"{m.kind} {m.name}" for m in verdict.comparison.mismatches]
    if mismatches:
        exact = mismatches == [f"weights {site}"]
        return {"precheck": mismatches, "exact": exact, "bitwise_exact": exact, "bytes": size}
    (edge,) = verdict.comparison.edges
    over = over_budget(verdict, edge)
    bitwise = edge.first_bitwise.site if edge.first_bitwise else None
    return {
        "precheck": [],
        "over_budget": [(o.unit.site, o.side) for o in over],
        "first_bitwise": bitwise,
        "max_abs_dlogp": edge.metrics.max_abs_dlogp,
        "exact": bool(over) and (over[0].unit.site, over[0].side) == (site, "train"),
        "bitwise_exact": bitwise is not None and bitwise == site,
        "bytes": size,
    }


def pairs() -> Iterator[tuple[Pair, tuple[Side, Side]]]:
    """The HF pairs, without a fault and with each."""
    for a, b in (("sdpa", "sdpa"), ("eager", "sdpa")):
        yield Pair(f"hf:attn={a}", f"hf:attn={b}", None, None), (Side(a), Side(b))
    for a, faults in (("sdpa", PLANTED), ("eager", PLANTED_ACROSS)):
        for fault in faults:
            sides = Side(a, fault), Side("sdpa", fault, faulty=True)
            yield Pair(f"hf:attn={a}", sides[1].spec, fault, FAULTS[fault].site), sides


def ours(found: list[Pair], name: str, folder: Path, prompts: Path, tokens: Path) -> None:
    """Says of every pair what is named within one budget."""
    run, budget = Run(folder / name), BUDGETS[name]
    specs = sorted({spec for pair in found for spec in (pair.rollout, pair.train)})
    traces = {}
    for attention in ("eager", "sdpa"):
        some = [s for s in specs if s.startswith(f"hf:attn={attention}")]
        traces |= dict(zip(some, captures(some, prompts, tokens, run, budget), strict=True))
    for pair in found:
        twin = traces[pair.rollout]
        if pair.rollout == pair.train:
            # The same capture on both sides would say nothing: a clean side is captured twice.
            again = Run(folder / f"{name}-twin")
            (twin,) = captures([pair.rollout], prompts, tokens, again, budget)
        pair.ours[name] = we_say(twin, traces[pair.train], pair.site)
        print(name, pair.train, pair.ours[name], flush=True)


def across_engines(folder: Path, prompts: Path, tokens: Path) -> Iterator[Pair]:
    """vLLM against Megatron, which msprobe cannot pair: no name of one is a name of the other."""
    faults = (None, *PLANTED_ACROSS)
    specs = [f"megatron:fault={fault}" if fault else "megatron" for fault in faults]
    found = [
        Pair("vllm", s, f, FAULTS[f].site if f else None)
        for s, f in zip(specs, faults, strict=True)
    ]
    for name in OURS[:2]:
        run = Run(folder / f"engines-{name}")
        (vllm,) = captures(["vllm"], prompts, tokens, run, BUDGETS[name])
        traces = captures(specs, prompts, tokens, run, BUDGETS[name])
        for pair, trace in zip(found, traces, strict=True):
            pair.ours[name] = we_say(vllm, trace, pair.site)
    yield from found


def seconds(*commands: list[str]) -> dict[str, float]:
    """Of these commands, one after another; a verdict's exit code is a result too."""
    started, before = time.monotonic(), os.times()
    for words in commands:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode not in (0, 1, 4):
            raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    wall, now = time.monotonic() - started, os.times()
    used = now.children_user + now.children_system - before.children_user - before.children_system
    return {"wall": wall, "processor": used}


def costs(folder: Path, source: Path, tokens: Path) -> dict[str, dict[str, float]]:
    """Seconds and bytes of one pair, from nothing, every command in a process of its own: the least
    of some times, the tools taking turns."""
    found: dict[str, dict[str, float]] = {}
    for turn in range(TIMES):
        at = folder / f"timed-{turn}"
        for name, cost in (*_msprobe_costs(at, tokens), *_our_costs(at, source)):
            known = found.setdefault(name, cost)
            found[name] = {key: min(known[key], cost[key]) for key in cost}
    return found


def _msprobe_costs(folder: Path, tokens: Path) -> Iterator[tuple[str, dict[str, float]]]:
    sides = {"clean": Side("sdpa", TIMED), "faulty": Side("sdpa", TIMED, faulty=True)}
    for task in TASKS:
        at = folder / task
        (at / "out").mkdir(parents=True)
        given = (json.dumps([asdict(s), task, str(tokens), str(at / n)]) for n, s in sides.items())
        steps = [[sys.executable, msprobe_side.__file__, words] for words in given]
        words = compare_command(at / "faulty", at / "clean", at / "out")
        words += ANALYSIS if task == "checksums" else []
        program = "import sys; from msprobe.msprobe import main; main()"
        spent = seconds(*steps, [sys.executable, "-c", program, *words[1:]])
        dumped = sum(size_of(at / name / "step0") for name in sides)
        sizes = {"sides": dumped, "all": dumped + size_of(at / "out")}
        yield f"msprobe, {task}", spent | sizes


def _our_costs(folder: Path, source: Path) -> Iterator[tuple[str, dict[str, float]]]:
    specs = ["hf:attn=sdpa", f"hf:attn=sdpa,fault={TIMED}"]
    for name, budget in BUDGETS.items():
        at = folder / name
        runs = [at / "a", at / "b"]
        flags = ["--tokens", str(source), "--trace-budget", f"{budget}B"]
        steps = [
            [*RLK, "capture", "--engine", s, "-o", str(r), *flags]
            for s, r in zip(specs, runs, strict=True)
        ]
        compare = [*RLK, "compare", *map(str, runs), "--run-dir", str(at / "ab")]
        spent = seconds(*steps, [*compare, "--edges", "prefill_vs_train"])
        sizes = {"sides": sum(map(size_of, runs)), "all": size_of(at)}
        yield f"rlk-align, {name}", spent | sizes


def everything(folder: Path) -> Iterator[dict[str, Any]]:
    """The report's parts: all pairs by both tools, then what one pair takes."""
    every = sorted(load_prompts(data_path("prompts.jsonl")), key=lambda p: len(p.text or ""))
    prompts, first = folder / "prompts.jsonl", (len(every) - PROMPTS) // 2
    save_prompts(every[first : first + PROMPTS], prompts)
    source = folder / "tokens"
    sample = [*RLK, "capture", "--engine", "hf", "-o", str(source), "--prompts", str(prompts)]
    seconds([*sample, "--max-new-tokens", str(NEW_TOKENS)])
    (tokens,) = source.glob("captures/*/tokens.parquet")
    found = []
    for pair, sides in pairs():
        for task in TASKS:
            pair.msprobe[task] = msprobe_side.says(sides, task, tokens, pair.site)
        print(pair.rollout, pair.train, json.dumps(pair.msprobe), flush=True)
        found.append(pair)
    for name in OURS:
        ours(found, name, folder, prompts, tokens)
    found += across_engines(folder, prompts, tokens)
    batch = TokenBatch.load(tokens)
    versions = ("rlk-align", "mindstudio-probe", "transformers", "torch")
    yield {
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in versions},
        "command": " ".join(["python", *sys.argv]),
        "sequences": len(batch.samples),
        "tokens": sum(len(s.ids) for s in batch.samples),
        "pairs": [asdict(pair) for pair in found],
    }
    yield {"costs": costs(folder, source, tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("msprobe"))
    parser.add_argument("--folder", type=Path, help="of the captures; default: one that is removed")
    args = parser.parse_args()
    if importlib.util.find_spec("msprobe") is None:
        parser.error("msprobe is not installed here: pip install mindstudio-probe")
    # Before any fork: a process of its own for each dump, and one import for all.
    import msprobe.msprobe
    import msprobe.pytorch  # noqa: F401

    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        report: dict[str, Any] = {}
        for part in everything(folder):
            report |= part
            args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            Path(f"{args.out}-tables.md").write_text(tables(report))
    print(tables(report))


if __name__ == "__main__":
    main()
