"""Products by expert in the shape of Qwen3-30B-A3B: hidden 2048, inner 768, 128 experts, 8 a token.

    PYTHONPATH=kernels python kernels/bench/bench_experts.py [--tokens 1 16 ...] [--json PATH]

Prints a table of microseconds. "products": the two grouped products alone, beside one torch.mm an
expert on rows that are sorted, whose counts the host knows (cuBLAS), and torch._grouped_mm.
"layer": from router logits to the sum, beside vLLM's topk and fused_experts where vLLM imports.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import rlk_kernels as rk
import torch
from timing import graphs_ms
from torch import Tensor

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def logits_of(t: int, spread: str) -> Tensor:
    """fp32 [T, E]: all experts alike, or the e-th chosen about as often as 1 / (e + 1) says."""
    noise = -torch.log(-torch.log(torch.rand(t, EXPERTS, device="cuda").clamp(1e-9, 1 - 1e-7)))
    if spread == "skewed":
        noise -= torch.arange(1, EXPERTS + 1, device="cuda").float().log()
    return noise


def by_cublas(x: Tensor, up: Tensor, inner: Tensor, down: Tensor, counts: list[int]) -> Callable:
    """One product an expert that has rows, of rows that lie sorted."""
    parts = [
        (e, a, b, torch.empty(len(a), 2 * INNER, device="cuda", dtype=x.dtype),
         torch.empty(len(a), HIDDEN, device="cuda", dtype=x.dtype))
        for e, (a, b) in enumerate(zip(x.split(counts), inner.split(counts), strict=True))
        if len(a)
    ]  # fmt: skip

    def run() -> None:
        for e, a, _, first, _ in parts:
            torch.mm(a, up[e].T, out=first)
        for e, _, b, _, second in parts:
            torch.mm(b, down[e].T, out=second)

    return run


def rivals(t: int, spread: str, up: Tensor, down: Tensor) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    x = torch.randn(t, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = logits_of(t, spread)
    shares, ids = rk.route(logits, TOP_K)
    groups = rk.group_by_expert(ids, EXPERTS)
    inner = torch.randn(t, TOP_K, INNER, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        rk.grouped_linear(x, up, groups)
        rk.grouped_linear(inner, down, groups)

    def layer() -> Tensor:
        shares, ids = rk.route(logits, TOP_K)
        groups = rk.group_by_expert(ids, EXPERTS)
        both = rk.grouped_linear(x, up, groups)
        rows = rk.grouped_linear(rk.swiglu(*both.chunk(2, -1)), down, groups)
        return rk.combine_experts(rows, shares, ids, EXPERTS)

    counts = groups.offsets.diff().tolist()
    order = groups.order.long()
    sorted_x, sorted_inner = x[order // TOP_K], inner.flatten(0, 1)[order]
    found: dict[str, Callable[[], object]] = {
        "products": products,
        "cublas": by_cublas(sorted_x, up, sorted_inner, down, counts),
        "layer": layer,
        "route": lambda: rk.route(logits, TOP_K),
        "group": lambda: rk.group_by_expert(ids, EXPERTS),
        "combine": lambda: rk.combine_experts(inner_rows, shares, ids, EXPERTS),
    }
    inner_rows = torch.randn(t, TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ends = groups.offsets[1:].contiguous()

    def grouped_mm() -> None:
        torch._grouped_mm(sorted_x, up.mT, offs=ends)
        torch._grouped_mm(sorted_inner, down.mT, offs=ends)

    try:
        grouped_mm()
        found["grouped_mm"] = grouped_mm
    except (AttributeError, RuntimeError) as error:
        print(f"torch._grouped_mm does not run: {error}"[:200])
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except ImportError:
        return found
    found["vllm"] = lambda: fused_experts(x, up, down, shares, ids)
    return found


def measure(tokens: list[int]) -> list[dict]:
    """A record a shape: microseconds of each rival."""
    torch.manual_seed(0)
    rk.warm_up("cuda")
    up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16) / 45
    down = torch.randn(EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16) / 28
    records = []
    for spread in ("balanced", "skewed"):
        for t in tokens:
            calls = {name: [call] for name, call in rivals(t, spread, up, down).items()}
            us = {name: ms * 1e3 for name, ms in graphs_ms(calls).items()}
            best = min(us[name] for name in ("cublas", "grouped_mm") if name in us)
            tflops = 6e-6 * t * TOP_K * HIDDEN * INNER / us["products"]
            records.append(
                {"spread": spread, "tokens": t, "us": us, "ratio": best / us["products"],
                 "tflops": tflops}
            )  # fmt: skip
    return records


def table(records: list[dict]) -> str:
    names = list(dict.fromkeys(name for r in records for name in r["us"]))
    lines = [" ".join(f"{x:>10}" for x in ("spread", "tokens", *names, "ratio", "TFLOP/s"))]
    for r in records:
        us = [f"{r['us'].get(name, float('nan')):.1f}" for name in names]
        cells = (r["spread"], r["tokens"], *us, f"{r['ratio']:.2f}", f"{r['tflops']:.0f}")
        lines.append(" ".join(f"{x:>10}" for x in cells))
    mean = sum(r["ratio"] for r in records) / len(records)
    return "\n".join([*lines, f"ratio to the faster of cublas and grouped_mm, mean: {mean:.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, "microseconds", flush=True)
    records = measure(asked.tokens)
    print(table(records))
    if asked.json is not None:
        asked.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
