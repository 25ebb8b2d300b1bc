"""Runs all benchmarks in one process, writes JSON, and prints every row as Markdown.

    python kernels/bench/run.py [--out reports/bench] [--only products,rows,...]

An NVIDIA GPU is needed. Times are medians of CUDA graph replays over inputs that outgrow the L2;
attention with its backward is timed by CUDA events around a few calls.
"""

import argparse
import importlib
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from tables import markdown  # noqa: E402

PARTS = {
    "products": {"products": "bench_products:measure"},
    "attention": {"prefill": "bench_attention:prefill", "decode": "bench_attention:decode"},
    "attention_training": {
        "times": "bench_attention_training:times",
        "errors": "bench_attention_training:errors",
    },
    "decode": {"widths": "bench_decode:widths"},
    "delta_rule": {
        "decode": "bench_delta_rule:decode",
        "prefill": "bench_delta_rule:prefill",
        "training": "bench_delta_rule:training",
    },
    "latent": {
        "decode": "bench_latent:decode",
        "prefill": "bench_latent:prefill",
        "training": "bench_latent:training",
    },
    "lora": {"lora": "bench_lora:measure"},
    "host": {"host": "bench_host:measure"},
    "rows": {"rows": "bench_rows:measure"},
    "sample": {"sample": "bench_sample:measure"},
    "linear_sample": {"linear_sample": "bench_linear_sample:measure"},
    "linear_logp": {"linear_logp": "bench_linear_logp:measure"},
    "linear_logp_rivals": {"rivals": "bench_linear_logp:rivals"},
    "linear_logp_precision": {"precision": "bench_linear_logp:precision"},
}
"""Part -> name in the part's record -> the function that measures it; it takes the ceilings."""
WITHOUT_GRADIENTS = ("products", "rows", "lora")


def ceilings() -> dict:
    """Copy bandwidth (bytes read and written) and bf16 matrix rate, measured here and now."""
    import torch
    from timing import event_ms

    x = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.numel() / event_ms(lambda: y.copy_(x)) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"copy_gbs": copy, "tflops": 2 * 8192**3 / event_ms(lambda: a @ b) / 1e9}


def head() -> str | None:
    try:
        git = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return git.stdout.strip() if git.returncode == 0 else None


def environment(commit: str | None) -> dict:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
        "commit": commit,
    }


def measure(part: str, limits: dict) -> dict:
    """Name -> the result of each measurement of a part."""
    results = {}
    for name, path in PARTS[part].items():
        module, _, function = path.partition(":")
        results[name] = getattr(importlib.import_module(module), function)(limits)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/bench"))
    every = ",".join(PARTS)
    parser.add_argument("--only", default=every, help=f"parts, separated by commas: {every}")
    parser.add_argument("--commit", default=head(), help="the commit that is measured")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown parts {unknown}; choose from {every}")
    import torch

    if not torch.cuda.is_available():
        print("bench: an NVIDIA GPU is needed, and torch finds none", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    limits = ceilings()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        with torch.set_grad_enabled(part not in WITHOUT_GRADIENTS):
            data = measure(part, limits)
        record = {"environment": environment(arguments.commit), "ceilings": limits, **data}
        (arguments.out / f"{part}.json").write_text(json.dumps(record, indent=1) + "\n")
        print("\n".join(markdown(record, part)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
