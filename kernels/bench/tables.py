"""Markdown of the benchmark records: the pages of products, attention and rows."""

import math


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    line = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(row) + " |" for row in (head, line, *rows)] + [""]


def linear(record: dict) -> list[str]:
    data = record["linear"]
    rows = sorted({r["m"] for r in data})
    ratios = [r["ratio"] for r in data]
    worst = min(data, key=lambda r: r["ratio"])
    lines = [
        f"bf16, CUDA graph replay. Ratio = time of cuBLAS / time of `linear`: geometric mean "
        f"**{geomean(ratios):.3f}** over {len(ratios)} shapes, lowest {worst['ratio']:.2f} at "
        f"M={worst['m']}, N={worst['n']}, K={worst['k']}; for M <= 64 "
        f"{geomean([r['ratio'] for r in data if r['m'] <= 64]):.3f}. Against cuBLASLt with 1 KiB "
        f"of workspace: {geomean([r['ratio_starved'] for r in data]):.3f}.",
        "",
        "## Ratio to cuBLAS",
        "",
    ]
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in data))
    by = {(r["n"], r["k"], r["m"]): r for r in data}
    lines += table(
        ["N x K", *[f"M={m}" for m in rows]],
        [[f"{n} x {k}", *[f"{by[n, k, m]['ratio']:.2f}" for m in rows]] for n, k in shapes],
    )
    lines += ["## Microseconds (share of the ceiling)", ""]
    lines += table(
        ["N x K", *[f"M={m}" for m in rows]],
        [
            [f"{n} x {k}"]
            + [f"{by[n, k, m]['us']['rlk']:.1f} ({by[n, k, m]['ceiling_share']:.2f})" for m in rows]
            for n, k in shapes
        ],
    )
    lines += ["## Batch-invariant over M = 1 ... 8192 (bits of the first rows)", ""]
    names = {"rlk": "linear", "cublas": "cuBLAS", "starved": "cuBLASLt, 1 KiB workspace"}
    lines += table(
        ["N x K", *names.values()],
        [
            [f"{n} x {k}", *["yes" if by[n, k, 1]["invariant"][i] else "no" for i in names]]
            for n, k in shapes
        ],
    )
    return lines


def products(record: dict) -> list[str]:
    data = [r | {"ratio": r["us"]["cublas"] / r["us"]["rlk"]} for r in record["products"]]
    data.sort(key=lambda r: r["ratio"])
    ratios = [r["ratio"] for r in data]
    lines = [
        f"bf16, CUDA graph replay, layers of published models with rows at random. Ratio = time of "
        f"cuBLAS / time of `linear`: geometric mean **{geomean(ratios):.3f}** over {len(data)} "
        f"products, lowest {ratios[0]:.2f}; {sum(x < 0.9 for x in ratios)} under 0.90, "
        f"{sum(x >= 1 for x in ratios)} at 1.00 or more.",
        "",
        "## By rows",
        "",
    ]
    by_rows = []
    for low, high in ((1, 16), (17, 64), (65, 512), (513, 2048), (2049, 16384)):
        part = [r["ratio"] for r in data if low <= r["m"] <= high]
        if part:
            mean, under = f"{geomean(part):.3f}", str(sum(x < 0.9 for x in part))
            by_rows.append([f"{low} ... {high}", str(len(part)), mean, f"{min(part):.2f}", under])
    lines += table(["M", "products", "geometric mean", "lowest", "under 0.90"], by_rows)
    lines += ["## The ten lowest", ""]
    lines += table(
        ["layer", "M", "N", "K", "linear us", "cuBLAS us", "ratio"],
        [
            [r["name"], str(r["m"]), str(r["n"]), str(r["k"])]
            + [f"{r['us'][i]:.1f}" for i in ("rlk", "cublas")]
            + [f"{r['ratio']:.2f}"]
            for r in data[:10]
        ],
    )
    return lines


def _cell(values: dict, name: str, digits: int = 0) -> str:
    return f"{values[name]:.{digits}f}" if name in values else "not measured"


def attention(record: dict) -> list[str]:
    lines = ["## Prefill, causal, bf16 (TFLOP/s; forward+backward counted as 3.5 x forward)", ""]
    lines += table(
        ["model", "sequences x tokens", "rlk", "cuDNN", "FlashAttention-2", "FlashAttention-3",
         "rlk / best", "rlk f+b", "cuDNN f+b", "FlashAttention-2 f+b"],
        [
            [r["model"], f"{r['batch']} x {r['tokens']}"]
            + [_cell(r["tflops"], i) for i in ("rlk", "cudnn", "flash2", "flash3")]
            + [f"{r['ratio']:.2f}"]
            + [_cell(r["tflops_forward_backward"], i) for i in ("rlk", "cudnn", "flash2")]
            for r in record["prefill"]
        ],
    )  # fmt: skip
    without = [
        r["tflops"]["rlk"] / max(r["tflops"][i] for i in ("cudnn", "flash2"))
        for r in record["prefill"]
    ]
    lines += [
        f"Geometric mean of rlk / best: {geomean([r['ratio'] for r in record['prefill']]):.3f}; "
        f"of rlk / best of torch's own: {geomean(without):.3f}.",
        "",
        "## Decode over a paged cache (blocks of 16; cuDNN and FlashAttention-2 read a dense one)",
        "",
    ]
    lines += table(
        ["model", "sequences x context", "rlk us", "share of copy bandwidth", "cuDNN us",
         "FlashAttention-2 us", "FlashAttention-3 us"],
        [
            [r["model"], f"{r['batch']} x {r['context']}", f"{r['us']['rlk']:.1f}",
             f"{r['bandwidth_share']:.2f}"]
            + [_cell(r["us"], i, 1) for i in ("cudnn", "flash2", "flash3")]
            for r in record["decode"]
        ],
    )  # fmt: skip
    return lines


def rows(record: dict) -> list[str]:
    lines = ["bf16, CUDA graph replay, microseconds; share = of the copy bandwidth.", ""]
    keys = ("rlk", "eager", "compiled", "liger")
    lines += table(
        ["operator", "M", "rlk", "share", "torch eager", "torch compiled", "Liger"],
        [
            [r["op"], str(r["m"]), f"{r['us']['rlk']:.1f}", f"{r['bandwidth_share']:.2f}"]
            + [_cell(r["us"], i, 1) for i in keys[1:]]
            for r in record["rows"]
        ],
    )
    big = [r["bandwidth_share"] for r in record["rows"] if r["m"] >= 8192]
    lines += [f"Geometric mean of the share at M = 8192: {geomean(big):.3f}.", ""]
    return lines


def decode(record: dict) -> list[str]:
    """Decode in wide tables, and batches as an engine has them."""
    widths = [0, 8192, 40960, 131072]
    lines = [
        "Heads 32/8 of 128, blocks of 16, bf16, CUDA graph replay over rotated caches,",
        "microseconds; share = of the copy bandwidth, scratch = MiB held beyond the results.",
        "Given: with a list that was made before (`paged_schedule`), where a call makes one.",
        "",
        "## By the block table's width in tokens",
        "",
    ]
    lines += table(
        ["sequences x context", "its own", "share", "8,192", "40,960", "131,072", "most / own",
         "given, its own", "given, 131,072", "scratch, own ... widest"],
        [
            [f"{r['batch']} x {r['context']}", f"{us[0]:.1f}", f"{r['bandwidth_share']:.2f}"]
            + [f"{us[w]:.1f}" if w in us else "" for w in widths[1:]]
            + [f"{max(us.values()) / us[0]:.2f}"]
            + [f"{given_us[w]:.1f}" if w in given_us else "" for w in (0, 131072)]
            + [f"{min(r['scratch_mib'].values()):.1f} ... {max(r['scratch_mib'].values()):.1f}"]
            for r in record["widths"]
            for us, given_us in [
                [{int(w): x for w, x in r[name].items()} for name in ("us", "given_us")]
            ]
        ],
    )  # fmt: skip
    lines += ["## Batches, in tables for 131,072 tokens", ""]
    lines += table(
        ["batch", "us", "given", "GB/s of distinct keys and values"],
        [
            [
                r["case"],
                f"{r['us']:.1f}",
                f"{r['given_us']:.1f}" if r["given_us"] else "",
                f"{r['gbs']:.0f}",
            ]
            for r in record["batches"]
        ],
    )
    return lines


def host(record: dict) -> list[str]:
    """Host time of an eager call."""
    lines = [
        "Microseconds of host time of one eager call without gradients, 16 rows; ratio = to "
        "F.linear of the same round. Operators take turns; medians.",
        "",
    ]
    return lines + table(
        ["operator", "us", "ratio"],
        [[x["operator"], f"{x['us']:.1f}", f"{x['ratio']:.1f}"] for x in record["host"]],
    )
