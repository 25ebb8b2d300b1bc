"""The pages of `bench_linear_logp`: time and memory, rivals, precision, group sizes."""

from shapes import SPREADS
from tables import geomean, table


def _number(value, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def rivals(record: dict) -> list[str]:
    measured = record["rivals"]
    names = measured["names"]
    lines = [
        "Forward, then forward and backward with per-token gradients, milliseconds (events, calls "
        "in turn), and MiB beyond inputs, results and gradients.",
        "",
    ]
    rows = []
    for r in measured["shapes"]:
        shape, gemm = f"{r['t']} x {r['h']} x {r['v']}", r["ms"]["forward"]["GEMM alone"]
        rows.append([f"{shape}, forward", f"{gemm:.2f}"])
        rows.append([f"{shape}, both", f"4 x {gemm:.2f}"])
        for row, kind in ((rows[-2], "forward"), (rows[-1], "both")):
            for name in names:
                ms, held = r["ms"][kind].get(name), r["held_mib"][name][kind]
                row.append(_number(held) if ms is None else f"{ms:.2f} ({_number(held, 0)})")
    lines += table(["T x H x V", "GEMM alone", *names], rows)
    return lines + [f"{name}: {why}." for name, why in measured["absent"].items()]


def precision(record: dict) -> list[str]:
    checks = record["precision"]
    lines = [
        "T=1000, V=32000; H and the standard deviation of the logits as named. Tokens are drawn "
        "from the softmax, as those are that a policy is scored on, or any (at 12 their "
        "log-probability is near -60).",
        "",
    ]
    what = {}
    for name, (h, spread) in SPREADS.items():
        for which in ("drawn", "any"):
            title = f"H={h}, {spread:.0f}, {which} tokens"
            what[f"error_{name}_{which}"] = f"max error of logp, {title}"
    what |= {
        "one_token": "takes a single token",
        "confident_gradient_error": "relative error of a confident token's hidden gradient",
        "invariant": "logp of a row free of its batch",
        "invariant_gradient": "hidden gradient of a row free of its batch",
        "repeats": "weight gradient the same in 5 runs",
    }

    def cell(value) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.1e}" if isinstance(value, float) else str(value)

    rows = []
    facts = list(checks.values())
    for key, title in what.items():
        if any(isinstance(f, dict) and key in f for f in facts):
            rows.append(
                [title, *[cell(f.get(key, "")) if isinstance(f, dict) else f for f in facts]]
            )
    return lines + table(["", *checks], rows)


def groups(record: dict) -> list[str]:
    lines = [
        "Memory of a policy step by group size (512 tokens a sequence, H=4096, V=128256): MiB "
        "beyond hidden states, weight and their gradients.",
        "",
    ]
    data = record["groups"]
    columns = [(kind, name) for kind in ("forward", "step") for name in data[0][kind]]
    titles = {"forward": "log-probabilities alone", "step": "loss and gradients"}
    rows = [
        [f"{titles[kind]}: {name}", *[_number(r[kind][name], 0) for r in data]]
        for kind, name in columns
    ]
    return lines + table(["", *[f"{r['group']} ({r['tokens']} tokens)" for r in data]], rows)


def time_and_memory(record: dict) -> list[str]:
    data = record["linear_logp"]
    ratios = {kind: [r[f"{kind}_ratio"] for r in data] for kind in ("forward", "both", "grpo")}
    held = {kind: max(r["held_mib"][kind] for r in data) for kind in ratios}
    lines = [
        "bf16, CUDA graphs replayed in turn with the cuBLAS GEMM hidden @ weight^T alone (which "
        "writes its logits). Forward / GEMM: geometric mean "
        f"**{geomean(ratios['forward']):.3f}**, highest {max(ratios['forward']):.3f}. Forward and "
        f"backward / 4 GEMMs: **{geomean(ratios['both']):.3f}**, highest "
        f"{max(ratios['both']):.3f}. linear_grpo_loss with its gradients / 3 GEMMs: "
        f"**{geomean(ratios['grpo']):.3f}**, highest {max(ratios['grpo']):.3f}. Held at most: "
        f"forward {held['forward']:.0f} MiB; forward and backward {held['both']:.0f} MiB, "
        f"linear_grpo_loss {held['grpo']:.0f} MiB beyond bf16 gradients.",
        "",
    ]
    kinds = {
        "forward": "forward / GEMM (MiB)",
        "both": "with backward / 4 GEMMs (MiB)",
        "grpo": "linear_grpo_loss / 3 GEMMs (MiB)",
    }
    rows = []
    for r in data:
        cells = [f"{r[f'{kind}_ratio']:.3f} ({r['held_mib'][kind]:.0f})" for kind in kinds]
        rows.append([f"{r['t']} x {r['h']} x {r['v']}", f"{r['ms']['gemm']:.3f}", *cells])
    return lines + table(["T x H x V", "GEMM ms", *kinds.values()], rows)
