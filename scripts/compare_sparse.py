"""Compares vLLM, eager and with CUDA graphs, with Megatron and HF on a sparse model, on one GPU.

    python fixtures/make_large_model.py qwen3-30b-a3b:layers=6 --out M --minutes 0.5 \\
        --step-tokens 4096 --prompts 64 --lengths 960-1088
    python scripts/compare_sparse.py --model M --out OUT [--train hf] [--kernels rlk] \\
        [--max-new-tokens 32] [--limit 400]

With the kernels vLLM samples and scores, eager and once more compiled, with CUDA graphs; Megatron
and HF score those tokens, and the contract is `bitwise`. Without the kernels the same pairs show
the drift, and the tokens that are sent to other experts. OUT/sparse.json and OUT/sparse.md are
written. The exit code is 1 if a pair with the kernels has another bit or did not finish. The same
command again continues with the comparisons that did not finish. `--tiny` runs the same on a CPU,
on the embedded sparse model. Comparisons run side by side, so their times mean nothing.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_layouts import EDGES, compared, replayed, with_kernels, write_report

ROOT = Path(__file__).parents[1]
TRAIN, MODES = ("megatron", "hf"), ("rlk", "off")
TINY_PROMPTS = 6


def all_pairs(
    out: Path,
    rollout: str,
    trainers: Sequence[str],
    modes: Sequence[str],
    asked: list[str],
    prompts: list[str],
    until: float,
) -> list[dict[str, Any]]:
    """Compares vLLM with the first trainer, in each mode of the kernels, then the others with what
    vLLM recorded. Returns the verdicts."""
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


def equal(found: dict[str, Any]) -> bool:
    """Whether a pair finished, has rows and log-probs on each edge, and no bit of them differs, in
    compiled passes either."""
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
    write_report(args.out / "sparse", found)
    return int(not all(equal(f) for f in found if f["kernels"] == "rlk"))


if __name__ == "__main__":
    sys.exit(main())
