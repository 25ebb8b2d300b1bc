#!/usr/bin/env python3
"""Makes the healthy runs that the built-in contracts are calibrated on.

    OMP_NUM_THREADS=1 python scripts/calibration_runs.py --dtype bfloat16 --out runs/bf16

For every seed the rollout engine samples once, and every training engine scores the samples; a
process captures several seeds. The runs contain the comparisons, and no captures:

    RUN = OUT/PAIR/SEED        rlk-align contract calibrate OUT/*/* --base bf16

On a GPU several commands may run side by side, each with its own seeds and folder:

    ... --rollout vllm --train megatron hf --vllm-options ,kv_cache_gb=1.5 --seeds 0-3 --out runs/0
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlk_align.capture.capture import capture_each
from rlk_align.capture.check import check_request
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.comparison_table import HEAD
from rlk_align.data import data_path
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.checkpoint import default_model, resolve_model
from rlk_align.model.edges import EDGES
from rlk_align.pipeline import measured
from rlk_align.progress import Progress, show_progress
from rlk_align.results import Kind
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run, RunRecord

PAIRS = {
    "vllm": ("megatron", "hf", "megatron:tp=2"),
    "hf": ("hf:attn=eager",),
    "sglang": ("hf",),
}
"""Rollout engine -> training engines."""


def request(spec: str, seed: int, options: argparse.Namespace, sampling: bool) -> CaptureRequest:
    separator = "," if ":" in spec else ":"
    own = getattr(options, f"{spec.partition(':')[0]}_options", "")
    more = options.engine_options + own
    passes = ("decode", "prefill") if sampling else ("prefill",)
    return CaptureRequest(
        engine=EngineSpec.parse(f"{spec}{separator}dtype={options.dtype}{more}"),
        model=str(resolve_model(options.model or default_model())),
        prompts=options.prompts or data_path("prompts.jsonl"),
        max_new_tokens=options.max_new_tokens,
        seed=seed,
        trace=TracePlan(budget=int(options.pass_budget * len(passes))),
        passes=passes,
        controls=options.controls,
    )


def runs_of(
    rollout: str, seeds: Sequence[int], options: argparse.Namespace, progress: Progress
) -> None:
    work = Run(options.out / "captures")
    sampled = sample(rollout, seeds, work, options, progress)
    for train in options.train or PAIRS[rollout]:
        scored = score(train, seeds, sampled, work, options, progress)
        for seed, a, b in zip(seeds, sampled, scored, strict=True):
            keep(a, b, options.out / pair_name(rollout, train) / str(seed), progress)
            shutil.rmtree(b.folder)
    for trace in sampled:
        shutil.rmtree(trace.folder)


def sample(
    rollout: str, seeds: Sequence[int], work: Run, options: argparse.Namespace, progress: Progress
) -> list[Trace]:
    work.folder.mkdir(parents=True, exist_ok=True)
    asked = [request(rollout, seed, options, sampling=True) for seed in seeds]
    check_request(asked[0], sampling=True)
    return capture_each(asked, "rollout", work, [None] * len(seeds), progress)


def score(
    train: str,
    seeds: Sequence[int],
    sampled: Sequence[Trace],
    work: Run,
    options: argparse.Namespace,
    progress: Progress,
) -> list[Trace]:
    tokens = [t.folder / "tokens.parquet" for t in sampled]
    asked = [request(train, seed, options, sampling=False) for seed in seeds]
    check_request(asked[0], sampling=False)
    return capture_each(asked, "train", work, tokens, progress)


def pair_name(rollout: str, train: str) -> str:
    return f"{rollout}-{train}".replace(":", "-")


def keep(
    rollout: Trace,
    train: Trace,
    folder: Path,
    progress: Progress,
    allowed: tuple[Kind, ...] = (),
) -> None:
    """Saves a run with the comparison and the rows of log-probs. The captures that it names are
    deleted later."""
    run = Run(folder)
    comparison, rows = measured(rollout, train, EDGES, allowed, progress)
    rows = rows.select(list(HEAD)).filter(rows["first_logprob"].is_valid())
    with run.locked():
        captures = run.relative({"rollout": rollout.folder, "train": train.folder})
        command = ["scripts/calibration_runs.py"]
        run.save(RunRecord(command=command, captures=captures, judged=EDGES, allowed=allowed))
        run.save_comparison(comparison, rows)
        run.save_verdict({})
        run.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seeds", default="0-19", help="the first and the last")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollout", nargs="+", default=["vllm", "hf"], choices=PAIRS)
    parser.add_argument("--train", nargs="+", help="default: all of PAIRS")
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--engine-options", default="", help="for every engine, as ,key=value")
    parser.add_argument("--vllm-options", default="", help="for vLLM, in addition")
    parser.add_argument("--sglang-options", default="", help="for SGLang, as ,python=...")
    parser.add_argument("--controls", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--together", type=int, default=4, help="seeds on disk at a time")
    parser.add_argument("--pass-budget", type=float, default=4e9, help="bytes of a pass's values")
    options = parser.parse_args()
    first, last = (int(x) for x in options.seeds.split("-"))
    with show_progress("calibration") as progress:
        for start in range(first, last + 1, options.together):
            seeds = range(start, min(start + options.together, last + 1))
            for rollout in options.rollout:
                runs_of(rollout, seeds, options, progress)


if __name__ == "__main__":
    main()
