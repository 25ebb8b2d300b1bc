"""Times products by expert in the shape of Qwen3-30B-A3B (hidden 2048, inner 768, 128 experts).

    PYTHONPATH=kernels python kernels/bench/bench_experts.py [--tokens 1 16 ...] [--json PATH]

The record of each shape is printed, and then the table, in microseconds. "products" are the two
grouped products alone. Their rivals (grouped_products.py), whose rows are sorted and padded, are
one torch.mm for each expert ("cublas", whose host knows the counts), torch._grouped_mm, and
DeepGEMM, on one buffer and, up to DECODE tokens, on a buffer for each expert ("deep_gemm_masked").
Every result is checked before it is timed. "group" sorts the tokens by expert. "layer" goes from
the router's logits to the sum of a token's experts; its rivals are vLLM's topk and fused_experts
on bf16 logits: "vllm" with the tiles that vLLM chooses on this card, "vllm-h200" with those that it
has tuned for the H200. Implementations that are not installed or do not run are named and left out.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grouped_products as grouped
import rlk_kernels as rk
import torch
from grouped_products import Products, Task
from timing import graphs_ms, rand
from torch import Tensor

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
PRODUCTS = ("cublas", "grouped_mm", "deep_gemm", "deep_gemm_masked")
LAYERS = ("vllm", "vllm-h200")
"""The rivals of the products, and of the layer."""
DECODE = 256
"""The most tokens for which each expert gets a buffer that has room for all of them."""
RATIOS = ("products ratio", "layer ratio")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def logits_of(t: int, spread: str) -> Tensor:
    """fp32 [T, E]: all experts equally likely, or ("skewed") expert e in proportion to 1 / (e +
    1)."""
    noise = -torch.log(-torch.log(torch.rand(t, EXPERTS, device="cuda").clamp(1e-9, 1 - 1e-7)))
    if spread == "skewed":
        noise -= torch.arange(1, EXPERTS + 1, device="cuda").float().log()
    return noise


def rivals(t: int, spread: str, up: Tensor, down: Tensor) -> dict[str, Callable[[], object]]:
    """Name -> a call that is timed."""
    x = rand(t, HIDDEN)
    logits = logits_of(t, spread)
    _, ids = rk.route(logits, TOP_K)
    groups = rk.group_by_expert(ids, EXPERTS)
    inner = rand(t, TOP_K, INNER)

    def products() -> tuple[Tensor, Tensor]:
        return rk.grouped_linear(x, up, groups), rk.grouped_linear(inner, down, groups)

    def layer() -> Tensor:
        shares, ids = rk.route(logits, TOP_K)
        groups = rk.group_by_expert(ids, EXPERTS)
        rows = rk.grouped_linear(rk.grouped_swiglu(x, up, groups), down, groups)
        return rk.combine_experts(rows, shares, ids, EXPERTS)

    order = groups.order.long()
    task = Task(
        x[order // TOP_K], up, inner.flatten(0, 1)[order], down, groups.offsets.diff().tolist()
    )
    right = grouped.exact(task)
    grouped.check(Products(products, order), right)
    timed: dict[str, Callable[[], object]] = {
        "products": products,
        "layer": layer,
        "group": lambda: rk.group_by_expert(ids, EXPERTS),
    }

    def checked(name: str, make: Callable[[Task], Products]) -> dict[str, Callable[[], object]]:
        made = make(task)
        grouped.check(made, right)
        return {name: made.run}

    others: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {
        "cuBLAS": lambda: checked("cublas", grouped.by_cublas),
        "torch._grouped_mm": lambda: checked("grouped_mm", grouped.by_grouped_mm),
        "DeepGEMM": lambda: checked("deep_gemm", grouped.by_deep_gemm),
        "vLLM": lambda: vllm_layers(x, logits.bfloat16(), up, down),
    }
    if t <= DECODE:
        masked = partial(grouped.by_deep_gemm_masked, most=t)
        others["DeepGEMM, masked"] = lambda: checked("deep_gemm_masked", masked)
    for name, make in others.items():
        try:
            calls = make()
            for call in calls.values():
                call()
            torch.cuda.synchronize()
            timed |= calls
        except ModuleNotFoundError as error:
            print(f"{name} is not installed: {error}", flush=True)
        except Exception as error:  # of any kind: a rival that does not run is named
            print(f"{name} does not run: {type(error).__name__}: {error}"[:300], flush=True)
    return timed


def vllm_layers(
    x: Tensor, logits: Tensor, up: Tensor, down: Tensor
) -> dict[str, Callable[[], object]]:
    """vLLM's sparse layer, with the tiles that it chooses here and with those of the H200."""
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    def layer() -> Tensor:
        shares, ids, _ = fused_topk(x, logits, TOP_K, True)
        return fused_experts(x, up, down, shares, ids)

    folder = Path(fused_moe.__file__).parent / "configs"
    tuned = folder / f"E={EXPERTS},N={INNER},device_name=NVIDIA_H200.json"
    tiles = {int(t): tile for t, tile in json.loads(tuned.read_text()).items() if t.isdigit()}
    nearest = tiles[min(tiles, key=lambda t: abs(t - len(x)))]

    def with_tiles() -> Tensor:
        with fused_moe.override_config(nearest):
            return layer()

    return {"vllm": layer, "vllm-h200": with_tiles}


def measure(tokens: list[int]) -> list[dict]:
    """A record for each shape, with the microseconds of each call."""
    torch.manual_seed(0)
    rk.warm_up("cuda")
    up = rand(EXPERTS, 2 * INNER, HIDDEN, scale=1 / 45)
    down = rand(EXPERTS, HIDDEN, INNER, scale=1 / 28)
    records = []
    for spread in ("balanced", "skewed"):
        for t in tokens:
            calls = {name: [call] for name, call in rivals(t, spread, up, down).items()}
            us = {name: ms * 1e3 for name, ms in graphs_ms(calls).items()}
            record = {
                "spread": spread, "tokens": t, "us": us,
                "tflops": 6e-6 * t * TOP_K * HIDDEN * INNER / us["products"],
                "products ratio": _ratio(us, "products", PRODUCTS),
                "layer ratio": _ratio(us, "layer", LAYERS),
            }  # fmt: skip
            print(json.dumps(record), flush=True)
            records.append(record)
    return records


def _ratio(us: dict[str, float], ours: str, others: tuple[str, ...]) -> float:
    """The time of the fastest of `others` divided by ours; NaN where none of them ran."""
    return min((us[name] for name in others if name in us), default=float("nan")) / us[ours]


def table(records: list[dict]) -> str:
    names = list(dict.fromkeys(name for r in records for name in r["us"]))
    heads = ("spread", "tokens", *names, *RATIOS, "TFLOP/s")
    lines = [" ".join(f"{x:>10}" for x in heads)]
    for r in records:
        us = [f"{r['us'].get(name, float('nan')):.1f}" for name in names]
        ratios = [f"{r[name]:.2f}" for name in RATIOS]
        cells = (r["spread"], r["tokens"], *us, *ratios, f"{r['tflops']:.0f}")
        lines.append(" ".join(f"{x:>{max(10, len(h))}}" for h, x in zip(heads, cells, strict=True)))
    for name, others in zip(RATIOS, (PRODUCTS, LAYERS), strict=True):
        mean = sum(r[name] for r in records) / len(records)
        lines.append(f"{name}, to the faster of {', '.join(others)}, mean: {mean:.3f}")
    return "\n".join(lines)


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
