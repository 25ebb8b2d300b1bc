"""Compares vLLM on two GPUs with every layout of every training engine, in one table.

    python scripts/compare_layouts.py --model M --out OUT [--kernels rlk off]
                                      [--train megatron:tp=2,sp=1] [--max-new-tokens 32]
                                      [--limit 540]

Two GPUs, vLLM and megatron-core are needed, with the kernels installed as vLLM's plugin, and a
model with its prompts as `fixtures/make_large_model.py` makes them. The model may be dense or
sparse; Megatron's ranks share the experts of a sparse one. vLLM at tp=2 samples and scores, eager
and once more compiled, with CUDA graphs; each training engine scores those tokens with the kernels,
and the contract is `bitwise`. vLLM on one GPU samples by itself. Without the kernels, two pairs
show the drift. OUT/layouts.json and OUT/layouts.md are written. The exit code is 1 if a pair with
the kernels has another bit or did not finish, or if no compiled pass replayed a CUDA graph. The
same command again continues with the comparisons that did not finish.

Comparisons with the kernels run side by side, so their times mean nothing. Those without the
kernels run one by one, because two engines do not fit into the memory beside others; `--kernels
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
from rlk_align.model.families import read_shape

VLLM = "kv_cache_gb=4"
ROLLOUT = f"vllm:tp=2,{VLLM}"
ONE_GPU = f"vllm:{VLLM}"
DENSE = {
    "megatron:tp=2": "0,1",
    "megatron:tp=2,sp=1": "0,1",
    "megatron": "0",
    "fsdp:dp=2": "0,1",
    "hf": "1",
}
"""Layouts of training engines -> the GPUs of each."""
SPARSE = {"megatron": "0", "megatron:ep=2": "0,1", "fsdp:dp=2": "0,1", "hf": "1"}
"""The same for a model that has sparse layers."""
EDGES = ("decode_vs_prefill", "prefill_vs_train")


@dataclass
class Job:
    """One command in the background, and where it leaves its verdict."""

    label: str
    kernels: str
    words: list[str]
    folder: Path
    gpus: str = "0,1"
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)

    def start(self) -> "Job":
        """Starts it, unless an earlier call finished it."""
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
        """Waits for it, prints the end of what it said, and notes its exit code; kills it then."""
        if self.process is None:
            return self
        try:
            code = self.process.wait(max(0.0, until - time.monotonic()))
            (self.folder / "code").write_text(str(code))
        except subprocess.TimeoutExpired:
            # With its engines' processes, which would keep their GPU.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        seconds = time.monotonic() - self.started
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        print(f"== {self.label}, kernels={self.kernels}, {seconds:.0f} s", flush=True)
        print("\n".join(lines[-20:]), flush=True)
        return self

    def result(self) -> dict[str, Any]:
        """Its exit code, None where it was killed; and, where it came to one, its verdict."""
        code, verdict = self.folder / "code", self.folder / "verdict.json"
        return {
            "pair": self.label,
            "kernels": self.kernels,
            "exit": int(code.read_text()) if code.is_file() else None,
            "verdict": json.loads(verdict.read_text()) if verdict.is_file() else None,
        }


def compared(
    out: Path,
    rollout: str,
    train: str,
    kernels: str,
    asked: list[str],
    label: str,
    gpus: str = "0,1",
) -> Job:
    folder = out / label.translate(str.maketrans(" :=,/", "-----")) / kernels
    words = [
        *("compare", "--rollout", rollout, "--train", with_kernels(train, kernels)),
        *("--run-dir", str(folder / "run"), "--output", f"json={folder / 'verdict.json'}"),
        *(("--contract", "bitwise") if kernels == "rlk" else ()),
        *asked,
    ]  # fmt: skip
    return Job(label, kernels, words, folder, gpus)


def with_kernels(spec: str, kernels: str) -> str:
    """The spec with or without the kernels: the flag of the command would run it both ways."""
    parsed = EngineSpec.parse(spec)
    return str(EngineSpec(parsed.name, {**parsed.options, "kernels": kernels}))


def asked(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--trace-budget", "60MB")


def prompts(model: Path, tokens: int) -> tuple[str, ...]:
    return ("--prompts", str(model / "prompts.jsonl"), "--max-new-tokens", str(tokens))


def layouts(model: Path, wanted: list[str] | None) -> list[tuple[str, str]]:
    """Each training engine's spec, and its GPUs; of those that are wanted."""
    found = SPARSE if read_shape(model).experts else DENSE
    return [(train, gpus) for train, gpus in found.items() if wanted is None or train in wanted]


def with_the_kernels(
    out: Path, model: Path, wanted: list[str] | None, tokens: int, until: float
) -> list[dict[str, Any]]:
    sampling = [*asked(model), *prompts(model, tokens)]
    (train, _), *others = layouts(model, wanted)
    first = compared(
        out, with_kernels(ROLLOUT, "rlk"), train, "rlk", [*sampling, "--production"],
        f"vllm:tp=2 / {train}",
    ).start()  # fmt: skip
    lone = out / "one-gpu"
    capture = ["capture", "--engine", with_kernels(ONE_GPU, "rlk"), "-o", str(lone / "run")]
    one_gpu = Job("vllm", "rlk", [*capture, *sampling], lone, gpus="1").start()
    done = [first.wait(until)]
    one_gpu.wait(until)
    recorded = first.folder / "run"
    scored = [
        compared(
            out, f"replay:path={recorded}", train, "rlk", [*asked(model), "--no-production"],
            f"vllm:tp=2 / {train}", gpus,
        ).start()
        for train, gpus in others
    ]  # fmt: skip
    folder = out / "tp2-tp1"
    words = ["compare", str(recorded), str(lone / "run"), "--contract", "bitwise"]
    words += ["--run-dir", str(folder / "run"), "--output", f"json={folder / 'verdict.json'}"]
    scored.append(Job("vllm:tp=2 / vllm", "rlk", words, folder).start())
    done += [job.wait(until) for job in scored]
    return [job.result() for job in done]


def without(
    out: Path, model: Path, wanted: list[str] | None, tokens: int, until: float
) -> list[dict[str, Any]]:
    """One by one. The second one scores the tokens of the first."""
    words, (train, _) = [*asked(model), "--no-production"], layouts(model, wanted)[0]
    pair = compared(
        out, with_kernels(ROLLOUT, "off"), train, "off", [*words, *prompts(model, tokens)],
        f"vllm:tp=2 / {train}",
    )  # fmt: skip
    replay = f"replay:path={pair.folder / 'run'}"
    lone = compared(out, replay, "hf", "off", words, "vllm:tp=2 / hf")
    return [job.start().wait(until).result() for job in (pair, lone)]


RUNS = {"rlk": with_the_kernels, "off": without}


def production_cells(verdict: dict[str, Any]) -> list[str]:
    """Of the compiled passes, decode and prefill: log-probs with other bits than the eager ones',
    and CUDA graphs that were replayed; empty where there are none."""
    passes = (verdict["controls"].get("production") or {}).values()
    return [
        ", ".join(f"{p['metrics']['bit_mismatches']:,} of {p['expected']:,}" for p in passes),
        ", ".join(f"{p['cuda_graph_replays']:,}" for p in passes),
    ]


def replayed(verdict: dict[str, Any]) -> bool:
    """Whether each compiled pass has every token, each with the bits of the eager one, and replayed
    CUDA graphs where there is a GPU."""
    passes = (verdict["controls"].get("production") or {}).values()
    return all(
        p["metrics"]["tokens"] == p["expected"]
        and p["metrics"]["bit_mismatches"] == 0
        and (p["cuda_graph_replays"] > 0 or not torch.cuda.is_available())
        for p in passes
    )


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
    """Writes OUT.json and OUT.md, and prints the table."""
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report = {"command": " ".join(sys.argv), "cards": cards, "torch": torch.__version__}
    out.with_suffix(".json").write_text(json.dumps(report | {"runs": found}, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(found))
    print(table(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    choices = tuple(dict.fromkeys([*DENSE, *SPARSE]))
    parser.add_argument("--train", nargs="+", choices=choices, help="default: all of the model's")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument(
        "--limit", type=float, default=540, help="seconds; what runs then is killed"
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=RUNS, default=tuple(RUNS), help="which pairs"
    )
    args = parser.parse_args()
    if not layouts(args.model, args.train):
        parser.error("no layout of --train is one of the model's")
    until = time.monotonic() + args.limit
    found = [
        pair
        for kernels in args.kernels
        for pair in RUNS[kernels](args.out, args.model, args.train, args.max_new_tokens, until)
    ]
    write_report(args.out / "layouts", found)
    equal = [f["exit"] == 0 and replayed(f["verdict"]) for f in found if f["kernels"] == "rlk"]
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main())
