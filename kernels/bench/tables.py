"""Markdown of the benchmark records: the pages of products, attention and rows."""

import math


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    line = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(row) + " |" for row in (head, line, *rows)] + [""]


def linear(record: dict) -> list[str]:
    """One line a weight; the record has the microseconds of each M."""
    data = record["linear"]
    ratios = [r["ratio"] for r in data]
    small, large = ([r for r in data if (r["m"] <= 64) is few] for few in (True, False))
    lines = [
        f"bf16, CUDA graph replay, M = 1, 2, 4 ... 8192. Ratio = time of cuBLAS / time of "
        f"`linear`: geometric mean **{geomean(ratios):.3f}** over {len(ratios)} shapes, lowest "
        f"{min(ratios):.2f}; for M <= 64 {geomean([r['ratio'] for r in small]):.3f}. Against "
        f"cuBLASLt with 1 KiB of workspace: {geomean([r['ratio_starved'] for r in data]):.3f}. "
        "Batch-invariant: the bits of the first rows are the same for every M.",
        "",
    ]
    names = {"rlk": "linear", "cublas": "cuBLAS", "starved": "cuBLASLt, 1 KiB"}
    rows = []
    for n, k in dict.fromkeys((r["n"], r["k"]) for r in data):
        few, many = ([r for r in of if (r["n"], r["k"]) == (n, k)] for of in (small, large))
        lowest = min(few + many, key=lambda r: r["ratio"])
        means = [f"{geomean([r['ratio'] for r in of]):.2f}" for of in (few, many)]
        kept = ["yes" if few[0]["invariant"][name] else "no" for name in names]
        rows.append([f"{n} x {k}", *means, f"{lowest['ratio']:.2f} (M={lowest['m']})", *kept])
    head = ["N x K", "M <= 64", "M > 64", "lowest"]
    return lines + table([*head, *(f"{x} batch-invariant" for x in names.values())], rows)


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
    lines = ["## Prefill, causal, bf16, TFLOP/s", ""]
    lines += table(
        ["model", "sequences x tokens", "rlk", "cuDNN", "FlashAttention-3", "rlk / best"],
        [
            [r["model"], f"{r['batch']} x {r['tokens']}"]
            + [_cell(r["tflops"], i) for i in ("rlk", "cudnn", "flash3")]
            + [f"{r['ratio']:.2f}"]
            for r in record["prefill"]
        ],
    )
    lines += [
        f"Geometric mean of rlk / best: {geomean([r['ratio'] for r in record['prefill']]):.3f}.",
        "",
        "## Decode over a paged cache (blocks of 16; cuDNN reads a dense one), microseconds",
        "",
    ]
    lines += table(
        ["model", "sequences x context", "rlk (share of copy bandwidth)", "cuDNN",
         "FlashAttention-3"],
        [
            [r["model"], f"{r['batch']} x {r['context']}"]
            + [f"{r['us']['rlk']:.1f} ({r['bandwidth_share']:.2f})"]
            + [_cell(r["us"], i, 1) for i in ("cudnn", "flash3")]
            for r in record["decode"]
        ],
    )  # fmt: skip
    return lines


def rows(record: dict) -> list[str]:
    """One line an operator; the record has its other row counts and torch in eager mode."""
    shown = sorted({r["m"] for r in record["rows"] if r["m"] != 64})
    lines = [
        "bf16, CUDA graph replay, microseconds: rlk (share of the copy bandwidth), Liger, and "
        f"torch compiled (at M = {shown[-1]}). `logp` has at most 2048 rows.",
        "",
    ]
    by: dict[str, list[str]] = {}
    for r in record["rows"]:
        if r["m"] in shown:
            rivals = [_cell(r["us"], "liger", 1)]
            if r["m"] == shown[-1]:
                rivals.append(_cell(r["us"], "compiled", 1))
            mine = f"{r['us']['rlk']:.1f} ({r['bandwidth_share']:.2f})"
            by.setdefault(r["op"].partition(" (")[0], []).append(", ".join([mine, *rivals]))
    lines += table(["operator", *(f"M = {m}" for m in shown)], [[op, *x] for op, x in by.items()])
    big = [r["bandwidth_share"] for r in record["rows"] if r["m"] >= 8192]
    lines += [f"Geometric mean of the share at M = 8192: {geomean(big):.3f}.", ""]
    return lines


def decode(record: dict) -> list[str]:
    """Decode in wide tables, and batches as an engine has them."""
    lines = [
        "Heads 32/8 of 128, blocks of 16, bf16, CUDA graph replay over rotated caches, "
        "microseconds. Share: of the copy bandwidth. Most / own: the slowest of tables for 8,192, "
        "40,960 and 131,072 tokens against the sequence's own. Given: with a list that was made "
        "before (`paged_schedule`), where a call makes one. Scratch: MiB held beyond the results.",
        "",
        "## By the block table's width",
        "",
    ]
    rows = []
    for r in record["widths"]:
        us, given = ({int(w): x for w, x in r[name].items()} for name in ("us", "given_us"))
        scratch = max(r["scratch_mib"].values())
        rows.append(
            [f"{r['batch']} x {r['context']}", f"{us[0]:.1f} ({r['bandwidth_share']:.2f})"]
            + [f"{us[131072]:.1f}" if 131072 in us else "", f"{max(us.values()) / us[0]:.2f}"]
            + [f"{given[w]:.1f}" if w in given else "" for w in (0, 131072)]
            + [f"{scratch:.0f}"]
        )
    lines += table(
        ["sequences x context", "its own (share)", "131,072", "most / own", "given, its own",
         "given, 131,072", "scratch"],
        rows,
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
