"""Compares vLLM on two GPUs with every layout of every training engine, in one table.

    python scripts/compare_layouts.py --model M --out OUT [--gpus 2] [--kernels rlk off]
                                      [--train megatron:tp=2,sp=1] [--max-new-tokens 32]
                                      [--limit 540]

The script needs two GPUs, vLLM and megatron-core, the kernels installed as vLLM's plugin, and a
model with its prompts as `fixtures/make_large_model.py` makes them. The model may be dense or
sparse; Megatron's ranks share the experts of a sparse one. vLLM at tp=2 samples and scores, eager
and once more compiled, with CUDA graphs; each training engine scores those tokens with the kernels,
and the contract is `bitwise`. vLLM on one GPU samples by itself. Without the kernels, two pairs
show the drift. `--gpus 1` compares vLLM on one GPU with Megatron and HF in the same way.

OUT/layouts.json and OUT/layouts.md are written. The exit code is 1 if a pair with the kernels has
another bit or did not finish, or if no compiled pass replayed a CUDA graph. The same command again
continues with the comparisons that did not finish.

Comparisons with the kernels run side by side, so their times mean nothing. Comparisons without the
kernels run one by one, because the memory has no room for two engines beside others; `--kernels
off` runs only these.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlk_align.engines.spec import EngineSpec
from rlk_align.model.shape import read_shape

ROLLOUTS = {1: "vllm:kv_cache_gb=4", 2: "vllm:tp=2,kv_cache_gb=4"}
"""Number of GPUs -> the rollout engine."""
DENSE = {
    "megatron:tp=2": "0,1",
    "megatron:tp=2,sp=1": "0,1",
    "megatron": "0",
    "fsdp:dp=2": "0,1",
    "hf": "1",
}
"""A training engine's layout -> its GPUs, where there are two."""
SPARSE = {"megatron": "0", "megatron:ep=2": "0,1", "fsdp:dp=2": "0,1", "hf": "1"}
"""The same for a model that has sparse layers."""
ONE_GPU = {"megatron": "0", "hf": "0"}
EDGES = ("decode_vs_prefill", "prefill_vs_train")


@dataclass
class Job:
    """A command that runs in the background, and the folder of its verdict."""

    label: str
    kernels: str
    words: list[str]
    folder: Path
    gpus: str = "0,1"
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)

    def start(self) -> "Job":
        """Starts the command, unless an earlier run of this script finished it."""
        if (self.folder / "code").is_file():
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlk_align", *self.words],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": self.gpus},
            )
        return self

    def wait(self, until: float) -> "Job":
        """Waits for the command, prints the end of its output, and writes its exit code; kills it
        at the time `until`."""
        if self.process is None:
            return self
        try:
            code = self.process.wait(max(0.0, until - time.monotonic()))
            (self.folder / "code").write_text(str(code))
        except subprocess.TimeoutExpired:
            # The whole group, because the engines' processes would keep their GPU.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        seconds = time.monotonic() - self.started
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        print(f"== {self.label}, kernels={self.kernels}, {seconds:.0f} s", flush=True)
        print("\n".join(lines[-20:]), flush=True)
        return self

    def result(self) -> dict[str, Any]:
        """The exit code, None where the command was killed; and the verdict, where there is one."""
        code, verdict = self.folder / "code", self.folder / "verdict.json"
        return {
            "pair": self.label,
            "kernels": self.kernels,
            "exit": int(code.read_text()) if code.is_file() else None,
            "verdict": json.loads(verdict.read_text()) if verdict.is_file() else None,
        }


@dataclass(frozen=True)
class Plan:
    """The arguments of the comparisons."""

    out: Path
    model: Path
    gpus: int
    trains: dict[str, str]
    """A training engine's layout -> its GPUs."""
    tokens: int
    until: float

    @property
    def rollout(self) -> str:
        return ROLLOUTS[self.gpus]

    @property
    def label(self) -> str:
        return {1: "vllm", 2: "vllm:tp=2"}[self.gpus]

    @property
    def scoring(self) -> tuple[str, ...]:
        """The flags of a command that scores tokens."""
        return ("--model", str(self.model), "--trace-budget", "60MB")

    @property
    def sampling(self) -> tuple[str, ...]:
        """The flags of a command that samples tokens."""
        prompts = ("--prompts", str(self.model / "prompts.jsonl"))
        return (*self.scoring, *prompts, "--max-new-tokens", str(self.tokens))

    def compare(self, rollout: str, train: str, kernels: str, *flags: str) -> Job:
        label = f"{self.label} / {train}"
        folder = self.out / label.translate(str.maketrans(" :=,/", "-----")) / kernels
        words = [
            *("compare", "--rollout", rollout, "--train", with_kernels(train, kernels)),
            *("--run-dir", str(folder / "run"), "--output", f"json={folder / 'verdict.json'}"),
            *(("--contract", "bitwise") if kernels == "rlk" else ()),
            *flags,
        ]  # fmt: skip
        # A comparison that samples runs vLLM too.
        gpus = self.trains[train] if rollout.startswith("replay:") else "0,1"
        return Job(label, kernels, words, folder, gpus if self.gpus == 2 else "0")


def with_kernels(spec: str, kernels: str) -> str:
    """The spec with or without the kernels: the flag of the command would run it both ways."""
    parsed = EngineSpec.parse(spec)
    return str(EngineSpec(parsed.name, {**parsed.options, "kernels": kernels}))


def with_the_kernels(plan: Plan) -> list[dict[str, Any]]:
    rollout = with_kernels(plan.rollout, "rlk")
    train, *others = plan.trains
    first = plan.compare(rollout, train, "rlk", *plan.sampling, "--production").start()
    alone = plan.out / "one-gpu"
    if plan.gpus == 2:
        capture = ["capture", "--engine", with_kernels(ROLLOUTS[1], "rlk")]
        words = [*capture, "-o", str(alone / "run"), *plan.sampling]
        one_gpu = Job("vllm", "rlk", words, alone, gpus="1").start()
    done = [first.wait(plan.until)]
    recorded = first.folder / "run"
    flags = (*plan.scoring, "--no-production")
    jobs = [
        plan.compare(f"replay:path={recorded}", train, "rlk", *flags).start() for train in others
    ]
    if plan.gpus == 2:
        one_gpu.wait(plan.until)
        folder = plan.out / "tp2-tp1"
        words = ["compare", str(recorded), str(alone / "run"), "--contract", "bitwise"]
        words += ["--run-dir", str(folder / "run"), "--output", f"json={folder / 'verdict.json'}"]
        jobs.append(Job("vllm:tp=2 / vllm", "rlk", words, folder).start())
    return [job.result() for job in (*done, *(job.wait(plan.until) for job in jobs))]


def without(plan: Plan) -> list[dict[str, Any]]:
    """Runs the pairs one by one. HF scores the tokens of the first pair."""
    (train, *_), flags = plan.trains, ("--no-production",)
    rollout = with_kernels(plan.rollout, "off")
    pair = plan.compare(rollout, train, "off", *plan.sampling, *flags)
    jobs = [pair]
    if "hf" in plan.trains and train != "hf":
        replay = f"replay:path={pair.folder / 'run'}"
        jobs.append(plan.compare(replay, "hf", "off", *plan.scoring, *flags))
    return [job.start().wait(plan.until).result() for job in jobs]


RUNS = {"rlk": with_the_kernels, "off": without}


def production_cells(verdict: dict[str, Any]) -> list[str]:
    """For the compiled decode and prefill: the number of log-probs whose bits differ from the eager
    pass, and of replayed CUDA graphs; empty where there are no such passes."""
    passes = (verdict["controls"].get("production") or {}).values()
    return [
        ", ".join(f"{p['metrics']['bit_mismatches']:,} of {p['expected']:,}" for p in passes),
        ", ".join(f"{p['cuda_graph_replays']:,}" for p in passes),
    ]


def replayed(verdict: dict[str, Any]) -> bool:
    """Whether each compiled pass has every token with the bits of the eager pass, and replayed CUDA
    graphs where there is a GPU."""
    passes = (verdict["controls"].get("production") or {}).values()
    return all(
        p["metrics"]["tokens"] == p["expected"]
        and p["metrics"]["bit_mismatches"] == 0
        and (p["cuda_graph_replays"] > 0 or not torch.cuda.is_available())
        for p in passes
    )


def equal(found: dict[str, Any]) -> bool:
    """Whether a pair finished and has rows and log-probs on each of its edges, all with equal bits,
    in compiled passes too."""
    verdict = found["verdict"]
    if found["exit"] != 0 or verdict is None or not verdict["edges"]:
        return False
    same = all(
        e and e["tokens"] > 0 and e["bit_mismatches"] == 0 for e in verdict["edges"].values()
    )
    return same and replayed(verdict)


COLUMNS = (
    "rollout / train",
    "kernels",
    "verdict",
    "rows paired",
    "other log-probs, decode / prefill",
    "prefill / training",
    "its mean abs Δ",
    "its max abs Δ",
    "tokens sent to other experts",
    "first site with another bit",
    "compiled: other log-probs, decode, prefill",
    "CUDA graph replays",
)


def row(found: dict[str, Any]) -> str:
    verdict = found["verdict"]
    coverage = verdict["coverage"] if verdict else {}
    if "paired" not in coverage:
        code = found["exit"]
        ended = "did not finish" if code is None else f"exit {code}"
        return f"| {found['pair']} | {found['kernels']} | {ended} |" + " |" * (len(COLUMNS) - 3)
    edges = [verdict["edges"].get(name) or {} for name in EDGES]
    trained = edges[1]
    routing = (verdict.get("routing") or {}).get(EDGES[1])
    first = (verdict["divergence"] or {}).get("first_bitwise")
    cells = [
        found["pair"], found["kernels"], verdict["status"],
        f"{coverage['paired']:,} of {coverage['expected']:,}",
        *(f"{e['bit_mismatches']:,} of {e['tokens']:,}" if e else "" for e in edges),
        *(f"{trained[k]:.2g}" if trained else "" for k in ("mean_abs_dlogp", "max_abs_dlogp")),
        f"{routing['flipped_tokens']:,} of {routing['tokens']:,}" if routing else "",
        first["site"] if first else "none",
        *production_cells(verdict),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table(found: list[dict[str, Any]]) -> str:
    rule = "| --- | --- | --- |" + " ---: |" * 6 + " --- | ---: | ---: |"
    return "\n".join(["| " + " | ".join(COLUMNS) + " |", rule, *map(row, found), ""])


def write_report(out: Path, found: list[dict[str, Any]]) -> None:
    """Writes `out`.json and `out`.md, and prints the table."""
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report = {"command": " ".join(sys.argv), "cards": cards, "torch": torch.__version__}
    out.with_suffix(".json").write_text(json.dumps(report | {"runs": found}, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(found))
    print(table(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=ROLLOUTS, default=2)
    choices = tuple(dict.fromkeys([*DENSE, *SPARSE]))
    parser.add_argument("--train", nargs="+", choices=choices, help="default: all of the model's")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds, after which all commands are killed"
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=RUNS, default=tuple(RUNS), help="which pairs"
    )
    args = parser.parse_args()
    layouts = ONE_GPU if args.gpus == 1 else SPARSE if read_shape(args.model).experts else DENSE
    trains = {t: gpus for t, gpus in layouts.items() if args.train is None or t in args.train}
    if not trains:
        parser.error(f"no layout of --train is one of the model's: {', '.join(layouts)}")
    until = time.monotonic() + args.limit
    plan = Plan(args.out, args.model, args.gpus, trains, args.max_new_tokens, until)
    found = [pair for kernels in args.kernels for pair in RUNS[kernels](plan)]
    write_report(args.out / "layouts", found)
    return int(not all(equal(f) for f in found if f["kernels"] == "rlk"))


if __name__ == "__main__":
    sys.exit(main())
