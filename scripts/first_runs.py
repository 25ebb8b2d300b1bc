#!/usr/bin/env python3
"""What the tool says in a newcomer's first runs: healthy setups, and faults of their own.

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python scripts/first_runs.py --out OUT
    python scripts/first_runs.py --only faults --out OUT

Each is a command line as a user types it, in a process of its own. OUT gets a folder a run, and
table.md. Exit code 1 where a healthy setup does not pass, or a fault is not named as it should be.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from rlk_align.judge.verdict import Verdict, judge_by, over_budget
from rlk_align.trace.run import Run

MAIN = "from rlk_align.cli.main import main; main()"
PROMPTS = """The capital of France is
def fibonacci(n):
Once upon a time there was a
The quick brown fox jumps over the lazy dog. The quick brown fox
In 1905 Albert Einstein
To be, or not to be, that is
import numpy as np
Dear Sir or Madam,
"""
LONG = "It was the best of times, it was the worst of times. " * 12

HEALTHY = (
    "",
    "--max-new-tokens 8",
    "--max-new-tokens 64",
    "--seed 7",
    "--rollout hf --train hf",
    "--rollout hf --train hf:attn=eager",
    "--rollout hf --train megatron",
    "--rollout hf --train fsdp",
    "--rollout hf --train hf:dtype=float32",
    "--rollout hf:dtype=float32 --train hf",
    "--rollout hf:dtype=float32 --train hf:dtype=float32,attn=eager",
    "--rollout hf:dtype=float16 --train megatron:dtype=float16",
    "--rollout vllm --train hf:batch=4,padding=left",
    "--rollout vllm --train hf:dtype=float32",
    "--rollout vllm:dtype=float32 --train megatron:dtype=float32",
    "--rollout vllm:enable_prefix_caching=1 --train hf",
    "--rollout vllm:max_num_batched_tokens=32 --train megatron:input=packed",
    "--rollout vllm --train megatron:tp=2",
    "--rollout vllm:temperature=0.7,logprobs=processed --train hf:temperature=0.7 "
    "--edges decode_vs_train",
    "--rollout hf --train hf:attn=eager --prompts LONG --max-new-tokens 40",
    "--rollout vllm --train megatron --prompts ONE --max-new-tokens 40",
)

FAULTS = {
    "rope_angles_fp16": "q_rope",
    "head_zeroed_from_a_position_on": "layers.1.attn",
    "channel_swapped_in_gate_and_up": "layers.1.gate_proj",
    "residual_fp8_between_layers": "layers.1.mlp_residual",
    "residual_fp8_inside": "layers.1.attn_residual",
    "attention_temperature_of_long_rows": "layers.0.attn",
    "value_of_one_key_zeroed": "layers.0.attn",
    "norm_changed_after_hashing": "layers.1.attn_norm",
    "stale_norm": "weights layers.1.mlp_norm",
    "stale_tied_embedding": "weights lm_head",
    "cache_damaged_in_decode": "layers.0.attn",
    "dropout_of_a_thousandth": "does not repeat itself",
    "noise_of_a_thousandth": "does not repeat itself",
    "rare_random_rows": "does not repeat itself",
    "temperature_99": "logprob",
    "log_softmax_bf16": "logprob",
    "embedding_row": "embed",
    "norm_in_bf16": "layers.1.mlp_norm",
    "gelu_for_silu": "attributes layers.1.activation",
    "output_scaled": "layers.1.o_proj",
    "down_projection_in_fp8": "layers.1.act",
    "key_norm_left_out": "layers.1.k_norm",
    "final_norm_with_another_epsilon": "final_norm",
    "logits_capped": "logits",
    "query_bias": "layers.1.q_proj",
}
"""Fault -> the first site that is over its budget, a mismatch of the precheck, or a doubt."""
REPEATED = {
    "rope_angles_fp16": ("q_rope", "k_rope"),
    "attention_temperature_of_long_rows": ("attn",),
    "value_of_one_key_zeroed": ("attn",),
    "cache_damaged_in_decode": ("attn",),
    "channel_swapped_in_gate_and_up": ("up_proj",),
}
"""Operators that a fault touches beside the first: in every layer, or with it."""


def compare(words: list[str], folder: Path) -> tuple[int, str]:
    """Its exit code, and what it printed."""
    command = [sys.executable, "-c", MAIN, "compare", *words]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--run-dir", str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    return done.returncode, done.stdout + done.stderr


def verdict_of(folder: Path) -> Verdict | None:
    run = Run(folder)
    return judge_by(run.comparison, None) if (folder / "comparison.json").exists() else None


def blamed(verdict: Verdict) -> list[tuple[str, str]]:
    """(site, side) of every operator that any edge calls off, each once."""
    found = [
        (o.unit.site, str(o.side))
        for e in verdict.comparison.edges
        for o in over_budget(verdict, e)
    ]
    return list(dict.fromkeys(found))


def healthy(
    out: Path, prompts: dict[str, Path], share: tuple[int, int]
) -> Iterator[tuple[bool, str]]:
    for number, words in list(enumerate(HEALTHY))[share[0] :: share[1]]:
        if "--prompts" not in words:
            words = f"--prompts PROMPTS {words}".strip()
        typed = [str(prompts.get(w, w)) for w in words.split()]
        code, text = compare(typed, out / f"healthy-{number}")
        reason = "" if code == 0 else text.strip().splitlines()[-1]
        yield code == 0, f"| `{words}` | {'pass' if code == 0 else f'exit {code}: {reason}'} |"


def planted(
    out: Path, prompts: dict[str, Path], share: tuple[int, int]
) -> Iterator[tuple[bool, str]]:
    for name, expected in list(FAULTS.items())[share[0] :: share[1]]:
        decode = name == "cache_damaged_in_decode"
        side = "rollout" if decode else "train"
        other = "train" if decode else "rollout"
        words = ["--prompts", str(prompts["FAULTS"])]
        words += [f"--{side}", f"hf:patch=first_runs_faults:{name}", f"--{other}", "hf"]
        code, text = compare(words, out / name)
        verdict = verdict_of(out / name)
        if verdict is None:
            yield False, f"| `{name}` | {expected} | exit {code}: {text.strip()[-200:]} |"
            continue
        names = {f"{m.kind} {m.name}" for m in verdict.comparison.mismatches}
        doubts = [d for d in verdict.doubts if expected in d]
        found = blamed(verdict)
        if code == 4:
            said = ", ".join(sorted(names)) or "; ".join(verdict.doubts)
            good = expected in names or any(n.endswith(expected) for n in names) or bool(doubts)
            good = good or any(n.startswith(expected) for n in names)
        else:
            said = ", ".join(f"{site} ({whose})" for site, whose in found)
            also = REPEATED.get(name, ())
            beside = [s for s, _ in found[1:] if s.rpartition(".")[2] not in also]
            first = found[0] if found else ("nothing", "")
            good = first[0].endswith(expected) and not beside
            good = good and all(whose == side for _, whose in found)
        yield good, f"| `{name}` | {expected} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["healthy", "faults"])
    parser.add_argument("--share", default="0of1", help="every Nth from the Kth on: KofN")
    options = parser.parse_args()
    first, _, step = options.share.partition("of")
    options.out.mkdir(parents=True, exist_ok=True)
    texts = {"PROMPTS": PROMPTS, "ONE": "Hello\n", "LONG": f"{LONG}\n" * 2}
    texts["FAULTS"] = f"{PROMPTS}{LONG}\n"
    prompts = {name: options.out / f"{name.lower()}.txt" for name in texts}
    for name, text in texts.items():
        prompts[name].write_text(text)
    lines = [f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"]
    bad = 0
    parts = {"healthy": (healthy, "| setup | verdict |\n| --- | --- |")}
    parts["faults"] = (planted, "| fault | expected | named |\n| --- | --- | --- |")
    for part, (rows, head) in parts.items():
        if options.only in (None, part):
            lines += ["", head]
            for good, line in rows(options.out, prompts, (int(first), int(step))):
                bad += not good
                lines.append(line if good else f"{line} **not as it should be**")
                print(lines[-1], flush=True)
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print(f"{bad} not as they should be")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
