"""vLLM, eager and with CUDA graphs, against Megatron and HF on a sparse model, on one GPU.

    python fixtures/make_large_model.py qwen3-30b-a3b:layers=6 --out M --minutes 0.5 \\
        --step-tokens 4096 --prompts 64 --lengths 960-1088
    python scripts/compare_sparse.py --model M --out OUT [--train hf] [--kernels rlk] \\
        [--max-new-tokens 32] [--limit 400]

With the kernels vLLM samples and scores, eager and once more compiled, with CUDA graphs;
Megatron and HF score those tokens, and the contract is `bitwise`. Without them the same pairs show
the drift, and the tokens that are sent to other experts. Writes OUT/sparse.json and OUT/sparse.md,
and fails where a pair with the kernels has another bit or did not finish. The same call again goes
on with what did not finish. `--tiny` runs the same on a CPU, on the embedded sparse model.
Comparisons run side by side: their times say nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compare_layouts import PRODUCTION, compared, production_cells, replayed, with_kernels

ROOT = Path(__file__).parents[1]
TRAIN, MODES = ("megatron", "hf"), ("rlk", "off")
EDGES = ("decode_vs_prefill", "prefill_vs_train")
TINY_PROMPTS = 6
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
    *PRODUCTION,
)


def all_pairs(
    out: Path,
    rollout: str,
    trainers: Sequence[str],
    modes: Sequence[str],
    asked: list[str],
    prompts: list[str],
    until: float,
) -> list[dict[str, Any]]:
    """Runs vLLM against the first trainer, in each mode of the kernels, then the others against
    what vLLM recorded; the verdicts."""
    production = {"rlk": "--production", "off": "--no-production"}
    first = {
        kernels: compared(
            out, with_kernels(rollout, kernels), trainers[0], kernels,
            [*asked, *prompts, production[kernels]], f"vllm / {trainers[0]}", gpus="0",
        ).start()
        for kernels in modes
    }  # fmt: skip
    done = [job.wait(until) for job in first.values()]
    behind = [
        compared(
            out, f"replay:path={job.folder / 'run'}", train, kernels, [*asked, "--no-production"],
            f"vllm / {train}", gpus="0",
        ).start()
        for kernels, job in first.items()
        for train in trainers[1:]
    ]  # fmt: skip
    done += [job.wait(until) for job in behind]
    return [job.result() for job in done]


def row(found: dict[str, Any]) -> str:
    verdict = found["verdict"]
    if verdict is None:
        code = found["exit"]
        ended = "did not finish" if code is None else f"exit {code}"
        return f"| {found['pair']} | {found['kernels']} | {ended} |" + " |" * (len(COLUMNS) - 3)
    edges = [verdict["edges"].get(name) or {} for name in EDGES]
    routing = (verdict.get("routing") or {}).get(EDGES[1])
    coverage, trained = verdict["coverage"], edges[1]
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


def equal(found: dict[str, Any]) -> bool:
    """Whether a pair finished, with rows and log-probs on each edge and no bit of them another,
    compiled too."""
    verdict = found["verdict"]
    if found["exit"] != 0 or verdict is None:
        return False
    edges = [verdict["edges"].get(name) for name in EDGES]
    same = all(e is not None and e["tokens"] > 0 and e["bit_mismatches"] == 0 for e in edges)
    return same and replayed(verdict)


def tiny_prompts(path: Path) -> Path:
    lines = (ROOT / "fixtures/prompts.jsonl").read_text("utf-8").splitlines()[:TINY_PROMPTS]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", action="append", choices=TRAIN, help="default: both")
    parser.add_argument("--kernels", action="append", choices=MODES, help="default: both")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument(
        "--limit", type=float, default=400, help="seconds; what runs then is killed"
    )
    parser.add_argument("--tiny", action="store_true", help="the embedded sparse model, on a CPU")
    args = parser.parse_args()
    if args.tiny == (args.model is not None):
        parser.error("give --model or --tiny")
    until = time.monotonic() + args.limit
    model = ROOT / "fixtures/sparse" if args.tiny else args.model
    prompts = tiny_prompts(args.out / "few.jsonl") if args.tiny else model / "prompts.jsonl"
    found = all_pairs(
        args.out,
        "vllm" if args.tiny else "vllm:kv_cache_gb=4",
        args.train or TRAIN,
        args.kernels or MODES,
        ["--model", str(model), "--trace-budget", "60MB"],
        ["--prompts", str(prompts), "--max-new-tokens", str(args.max_new_tokens)],
        until,
    )
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report = {"command": " ".join(sys.argv), "cards": cards, "torch": torch.__version__}
    (args.out / "sparse.json").write_text(json.dumps(report | {"runs": found}, indent=1) + "\n")
    (args.out / "sparse.md").write_text(table(found))
    print(table(found))
    return int(not all(equal(f) for f in found if f["kernels"] == "rlk"))


if __name__ == "__main__":
    sys.exit(main())
