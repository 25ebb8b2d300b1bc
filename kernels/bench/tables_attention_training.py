"""Markdown of the record of `bench_attention_training.py`."""

from tables import geomean, table

RIVALS = {
    "cudnn": "cuDNN",
    "flash2": "FlashAttention-2",
    "flash2 deterministic": "FlashAttention-2, deterministic",
}
NAMES = {"rlk": "rlk", **RIVALS}


def _shape(record: dict) -> list[str]:
    hq, hk, d = record["heads"]
    lengths = record["lengths"]
    ragged = len(set(lengths)) > 1
    of = ", ".join(map(str, lengths)) if ragged else f"{len(lengths)} x {lengths[0]}"
    return [f"{hq}/{hk} of {d}", of]


def _ratio(record: dict, what: str) -> float:
    of = record["tflops"]
    return of["rlk"][what] / max(of[name][what] for name in RIVALS)


def training(record: dict) -> list[str]:
    """Forward, backward and both, and the gradients' errors."""
    lines = [
        "Causal, bf16, TFLOP/s; the backward is counted as 2.5 x the forward, though here it is 7",
        "products where the rivals have 5. Medians of CUDA events, through autograd.",
        "",
    ]
    for what in ("backward", "both", "forward"):
        lines += [f"## {'Forward and backward' if what == 'both' else what.capitalize()}", ""]
        lines += table(
            ["heads", "sequences", *NAMES.values(), "rlk / best"],
            [
                _shape(r)
                + [f"{r['tflops'][name][what]:.0f}" for name in NAMES]
                + [f"{_ratio(r, what):.2f}"]
                for r in record["times"]
            ],
        )
        ratios = [_ratio(r, what) for r in record["times"]]
        lines += [
            f"Geometric mean of rlk / best: {geomean(ratios):.3f}; lowest {min(ratios):.2f}.",
            "",
        ]
    lines += ["## Errors of dq, dk, dv against float64 (norm of the difference / norm)", ""]
    lines += table(
        ["heads", "rlk", "cuDNN", "FlashAttention-2"],
        [
            ["{}/{} of {}".format(*r["heads"])]
            + [", ".join(f"{x:.2e}" for x in r["errors"][i]) for i in ("rlk", "cudnn", "flash2")]
            for r in record["errors"]
        ],
    )
    return lines
