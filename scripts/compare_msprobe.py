"""Planted faults between two HF sides: what rlk-align names, and what msprobe names.

    pip install mindstudio-probe
    python scripts/compare_msprobe.py --out reports/msprobe

Both tools see the same models, the same token ids and the same faults, of the catalogue
that `rlk-align selftest` plants. Writes OUT.json and OUT-tables.md. How an answer of
msprobe is read is said in `reports/msprobe.md`.
"""

import argparse
import contextlib
import csv
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from compare_engines import machine

from rlk_align.capture.capture import capture_each
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.data import data_path
from rlk_align.engines.faults.catalogue import FAULTS, choose
from rlk_align.engines.faults.operators import plant
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.hf.taps import hf_places
from rlk_align.engines.spec import EngineSpec
from rlk_align.judge.verdict import over_budget
from rlk_align.model.checkpoint import default_model, resolve_model
from rlk_align.model.families import read_shape
from rlk_align.model.prompts import TokenBatch, load_prompts, save_prompts
from rlk_align.probe.selftest.detect import verdict_of
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

PLANTED = (
    *("embed-scaled", "norm-statistics-bf16", "rope-key-position", "attn-scale"),
    *("kv-int8", "proj-gain", "proj-channel-shift", "act-beta", "residual-branch"),
    *("logits-fp8", "logprob-temperature", "weight-element"),
)
"""At least one of every class that a prefill on HF shows; both sides have sdpa's attention."""
PLANTED_ACROSS = ("proj-gain",)
"""Seen with eager against sdpa too."""
TASKS = {"checksums": "md5", "statistics": "statistics", "tensors": ""}
"""What msprobe dumps -> its `summary_mode`."""
TENSORS_OF = ("attn-scale", "proj-gain")
"""Faults whose tensors msprobe dumps too, beside those of two equal sides: they take longest."""
PROMPTS, NEW_TOKENS = 2, 16
TIMED = "proj-gain"


@dataclass(frozen=True, slots=True)
class Side:
    """An HF engine, and the operator at which a fault sits or, in its twin, might sit."""

    attention: str
    fault: str | None = None
    faulty: bool = False

    @property
    def spec(self) -> str:
        return f"hf:attn={self.attention}" + (f",fault={self.fault}" if self.faulty else "")


@dataclass(slots=True)
class Pair:
    """What both tools say of one pair."""

    rollout: str
    train: str
    fault: str | None
    site: str | None
    ours: dict[str, Any] = field(default_factory=dict)
    digests_alone: dict[str, Any] = field(default_factory=dict)
    msprobe: dict[str, dict[str, Any]] = field(default_factory=dict)


def planted(engine: HFEngine, side: Side) -> None:
    """Plants the fault, or in its twin nothing, so that msprobe sees the same calls on both sides:
    the formula's own calls are hidden, and its result leaves through one visible call."""
    from msprobe.core.common.runtime import Runtime

    operators = engine.operators()
    replace = operators.replace_operator

    def visibly(site: str, formula: Callable[..., torch.Tensor]) -> None:
        def planted_result(unit: Any) -> torch.Tensor:
            was, Runtime.is_running = Runtime.is_running, False
            value = formula(unit).to(unit.own.dtype) if side.faulty else unit.own
            Runtime.is_running = was
            return value * 1

        replace(site, planted_result)

    operators.replace_operator = visibly  # type: ignore[method-assign]
    assert side.fault is not None
    chosen = choose("hf", side.fault)
    if chosen.fault.kind == "computation" or side.faulty:
        plant(chosen, operators)


def dump(side: Side, task: str, tokens: Path, folder: Path) -> None:
    """One teacher-forced pass under msprobe, forward only, modules and torch's calls (`mix`)."""
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    model = resolve_model(default_model())
    engine = HFEngine(EngineSpec.parse(f"hf:attn={side.attention}"), model, read_shape(model))
    engine.open()
    if side.fault is not None:
        planted(engine, side)
    name = "tensor" if task == "tensors" else "statistics"
    options: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["forward"]}
    if TASKS[task]:
        options["summary_mode"] = TASKS[task]
    folder.mkdir(parents=True)
    config = {"task": name, "dump_path": str(folder), "rank": [], "step": [], "level": "mix"}
    (folder / "config.json").write_text(json.dumps(config | {name: options}))
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    debugger.start(model=engine.model)
    engine.score(TokenBatch.load(tokens), None, lambda _done: None)
    debugger.stop()
    places = {p.module: p.sites[0] for p in hf_places(engine.model) if p.end == "output"}
    (folder / "places.json").write_text(json.dumps(places))
    # `compare -da` looks for folders of ranks alone, and one process writes none.
    (process,) = (folder / "step0").iterdir()
    process.rename(process.with_name("rank0"))


def compare_command(faulty: Path, clean: Path, task: str, out: Path) -> list[str]:
    """`msprobe compare`; its first-difference analysis where checksums were dumped."""
    words = ["msprobe", "compare", "-tp", str(faulty / "step0"), "-gp", str(clean / "step0")]
    return [*words, "-o", str(out), *(["-da"] if task == "checksums" else [])]


def forked(work: Callable[..., None], *given: Any, log: Path) -> None:
    """Work in a process that has everything imported, and no hook of another dump."""

    def run() -> None:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work(*given)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"msprobe failed: {log.read_text()[-2000:]}")


def msprobe_command(words: list[str]) -> None:
    from msprobe.msprobe import main

    sys.argv = words
    main()


def msprobe_says(pair: tuple[Side, Side], task: str, tokens: Path, site: str | None) -> dict:
    """What msprobe names in a pair, and what it kept of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        log, out = folder / "log", folder / "out"
        out.mkdir()
        for side, name in zip(pair, ("clean", "faulty"), strict=True):
            forked(dump, side, task, tokens, folder / name, log=log)
        words = compare_command(folder / "faulty", folder / "clean", task, out)
        forked(msprobe_command, words, log=log)
        size = sum(size_of(folder / name / "step0") for name in ("clean", "faulty"))
        return named(out, folder / "faulty", site) | {"dump_bytes": size, "out_bytes": size_of(out)}


def named(out: Path, dumped: Path, site: str | None) -> dict[str, Any]:
    """The first node that a comparison calls different, and whether it is the planted operator:
    its module, a call inside that, or the call that gives the operator's result."""
    node = first_difference(out)
    if node is None:
        return {"node": None, "exact": False}
    rank = dumped / "step0" / "rank0"
    parent = json.loads((rank / "construct.json").read_text()).get(node)
    stacks = json.loads((rank / "stack.json").read_text()).values()
    stack = next((lines for nodes, lines in stacks if node in nodes), [])
    module = module_path(node if node.startswith("Module.") else parent)
    places = json.loads((dumped / "places.json").read_text())
    exact = any("in planted_result" in line for line in stack) or places.get(module) == site
    return {"node": node, "module": module, "exact": exact and site is not None}


def first_difference(out: Path) -> str | None:
    """Of `-da` the node that it names; of a table the first output with a warning or an error."""
    for path in out.glob("diff_analyze_*.json"):
        return next(iter(json.loads(path.read_text()).values()))[0]["op_name"]
    for path in out.glob("compare_result_*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                name, output, _ = row["NPU Name"].rpartition(".output.")
                if output and row["Result"] in ("warning", "error"):
                    return name
    return None


def module_path(node: str | None) -> str:
    """`Module.model.layers.0.mlp.Qwen3MLP.forward.1` -> `model.layers.0.mlp`."""
    named_class = (node or "").removeprefix("Module.").rpartition(".forward.")[0]
    return named_class.rpartition(".")[0]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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


RLK = [sys.executable, "-m", "rlk_align"]


def timings(folder: Path, source: Path, prompts: Path, tokens: Path) -> dict[str, dict]:
    """Seconds for one pair, from nothing, every command in a process of its own."""
    sides = (Side("sdpa", TIMED), Side("sdpa", TIMED, faulty=True))
    found = {}
    for task in TASKS:
        at = folder / f"timed-{task}"
        (at / "out").mkdir(parents=True)
        steps = []
        for side, name in zip(sides, ("clean", "faulty"), strict=True):
            given = json.dumps([asdict(side), task, str(tokens), str(at / name)])
            steps.append([sys.executable, __file__, "--dump", given])
        words = compare_command(at / "faulty", at / "clean", task, at / "out")
        program = "import sys; from msprobe.msprobe import main; main()"
        found[f"msprobe {task}"] = seconds(*steps, [sys.executable, "-c", program, *words[1:]])
    for name, flags in (("values", []), ("digests alone", ["--trace-budget", "1B"])):
        at = folder / f"timed-{name.split()[0]}"
        runs = [at / "a", at / "b"]
        specs = ["hf:attn=sdpa", f"hf:attn=sdpa,fault={TIMED}"]
        steps = [
            [*RLK, "capture", "--engine", s, "-o", str(r), "--tokens", str(source), *flags]
            for s, r in zip(specs, runs, strict=True)
        ]
        compare = [*RLK, "compare", *map(str, runs), "--run-dir", str(at / "ab")]
        found[f"rlk-align {name}"] = seconds(*steps, [*compare, "--edges", "prefill_vs_train"])
    whole = [*RLK, "compare", "--rollout", specs[0], "--train", specs[1], "--run-dir"]
    whole += [str(folder / "whole"), "--prompts", str(prompts), "--max-new-tokens", str(NEW_TOKENS)]
    found["rlk-align compare, with sampling, decode and controls"] = seconds(whole)
    return found


def pairs() -> Iterator[tuple[Pair, tuple[Side, Side]]]:
    for a, b in (("sdpa", "sdpa"), ("eager", "sdpa")):
        yield Pair(f"hf:attn={a}", f"hf:attn={b}", None, None), (Side(a), Side(b))
    for a, faults in (("sdpa", PLANTED), ("eager", PLANTED_ACROSS)):
        for fault in faults:
            sides = Side(a, fault), Side("sdpa", fault, faulty=True)
            yield Pair(f"hf:attn={a}", sides[1].spec, fault, FAULTS[fault].site), sides


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
        like = pair.rollout == "hf:attn=sdpa" and pair.fault in (None, *TENSORS_OF)
        for task in TASKS if like else ("checksums", "statistics"):
            pair.msprobe[task] = msprobe_says(sides, task, tokens, pair.site)
        print(pair.rollout, pair.train, json.dumps(pair.msprobe), flush=True)
        found.append(pair)
    for budget, name in ((8 * 10**9, "ours"), (1, "digests_alone")):
        run = Run(folder / name)
        specs = sorted({spec for pair in found for spec in (pair.rollout, pair.train)})
        traces = {}
        for attention in ("eager", "sdpa"):
            some = [s for s in specs if s.startswith(f"hf:attn={attention}")]
            traces |= dict(zip(some, captures(some, prompts, tokens, run, budget), strict=True))
        for pair in found:
            # The same capture on both sides would say nothing: a clean side is captured twice.
            twin = traces[pair.rollout]
            if pair.rollout == pair.train:
                (twin,) = captures(
                    [pair.rollout], prompts, tokens, Run(folder / f"{name}-twin"), budget
                )
            setattr(pair, name, we_say(twin, traces[pair.train], pair.site))
            print(name, pair.train, getattr(pair, name), flush=True)
    found += across_engines(folder, prompts, tokens)
    batch = TokenBatch.load(tokens)
    yield {
        "machine": machine(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("rlk-align", "mindstudio-probe", "transformers", "torch")
        },
        "command": " ".join(["python", *sys.argv]),
        "sequences": len(batch.samples),
        "tokens": sum(len(s.ids) for s in batch.samples),
        "pairs": [asdict(pair) for pair in found],
    }
    yield {"seconds": timings(folder, source, prompts, tokens)}


def across_engines(folder: Path, prompts: Path, tokens: Path) -> list[Pair]:
    """vLLM against Megatron, which msprobe cannot pair: no name of one is a name of the other."""
    run = Run(folder / "engines")
    specs = ["megatron", f"megatron:fault={TIMED}"]
    (vllm,) = captures(["vllm"], prompts, tokens, run, 8 * 10**9)
    found = []
    for spec, trace in zip(specs, captures(specs, prompts, tokens, run, 8 * 10**9), strict=True):
        fault = TIMED if "fault" in spec else None
        site = FAULTS[fault].site if fault else None
        pair = Pair("vllm", spec, fault, site)
        pair.ours = we_say(vllm, trace, site)
        found.append(pair)
    return found


def table(report: dict[str, Any]) -> str:
    """OUT-tables.md."""
    lines = [
        "| rollout | train | planted in | rlk-align: first over budget | first bitwise "
        "| digests alone | msprobe checksums, `-da` | msprobe statistics | msprobe tensors |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for p in report["pairs"]:
        cells = [p["rollout"], p["train"], p["site"] or "nothing"]
        cells += [_over(p["ours"], p["site"]), _bitwise(p["ours"], p["site"])]
        cells.append(_bitwise(p["digests_alone"], p["site"]))
        answers = [_node(p["msprobe"].get(task), p["site"]) for task in TASKS]
        cells += ["cannot pair them"] * len(TASKS) if p["rollout"] == "vllm" else answers
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| one pair, from nothing | wall | processor |", "| --- | ---: | ---: |"]
    lines += [
        f"| {name} | {value['wall']:.0f} s | {value['processor']:.0f} s |"
        for name, value in report["seconds"].items()
    ]
    return "\n".join([*lines, ""])


def _mark(exact: bool, site: str | None) -> str:
    return "" if site is None else "**exact**: " if exact else "not exact: "


def _over(said: dict[str, Any], site: str | None) -> str:
    if said["precheck"]:
        return _mark(said["exact"], site) + "precheck, " + ", ".join(said["precheck"])
    over = said["over_budget"]
    text = f"{over[0][0]} of {over[0][1]}" if over else "none"
    return _mark(said["exact"], site) + text + (f" (+{len(over) - 1})" if len(over) > 1 else "")


def _bitwise(said: dict[str, Any], site: str | None) -> str:
    if not said:
        return ""
    text = ", ".join(said["precheck"]) or said["first_bitwise"] or "none"
    return _mark(said["bitwise_exact"], site) + text


def _node(said: dict[str, Any] | None, site: str | None) -> str:
    if said is None:
        return "not run"
    if said["node"] is None:
        return _mark(False, site) + "none"
    within = f" in {said['module']}" if not said["node"].startswith("Module.") else ""
    return _mark(said["exact"], site) + f"`{said['node']}`{within}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("msprobe"))
    parser.add_argument("--folder", type=Path, help="of the captures; default: one that is removed")
    parser.add_argument("--dump", help="one side of a pair under msprobe, as JSON; used for times")
    args = parser.parse_args()
    if importlib.util.find_spec("msprobe") is None:
        parser.error("msprobe is not installed here: pip install mindstudio-probe")
    if args.dump:
        side, task, tokens, folder = json.loads(args.dump)
        dump(Side(**side), task, Path(tokens), Path(folder))
        return
    # Before any fork: a process of its own for each dump, and one import for all.
    import msprobe.msprobe
    import msprobe.pytorch  # noqa: F401

    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        report: dict[str, Any] = {"seconds": {}}
        for part in everything(folder):
            report |= part
            args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            Path(f"{args.out}-tables.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
