"""Markdown of the record of `bench_attention_training.py`."""

from tables import geomean, table

RIVALS = ("cudnn", "flash2", "flash2 deterministic")
SHOWN = ("rlk", "cudnn", "flash2 deterministic")


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
    kinds = {"backward": "backward", "both": "forward and backward", "forward": "forward"}
    lines = [
        "Causal, bf16, TFLOP/s: rlk, cuDNN, deterministic FlashAttention-2; then rlk / the best of "
        "these and of FlashAttention-2. The backward counts as 2.5 x the forward, though here it "
        "has 7 products and the rivals' 5. Medians of CUDA events, through autograd.",
        "",
    ]
    rows = []
    for r in record["times"]:
        cells = []
        for what in kinds:
            shown = ", ".join(f"{r['tflops'][name][what]:.0f}" for name in SHOWN)
            cells.append(f"{shown}: {_ratio(r, what):.2f}")
        rows.append(_shape(r) + cells)
    lines += table(["heads", "sequences", *kinds.values()], rows)
    for what, title in kinds.items():
        ratios = [_ratio(r, what) for r in record["times"]]
        lines.append(f"- {title}: geometric mean {geomean(ratios):.3f}, lowest {min(ratios):.2f}")
    lines.append("")
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
