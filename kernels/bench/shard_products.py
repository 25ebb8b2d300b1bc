"""The products of one tensor-parallel rank: `linear` beside cuBLAS at an engine's own shards.

    PYTHONPATH=kernels python kernels/bench/shard_products.py [--seconds 90] [--out FILE.json]

Needs one GPU. A rank of R multiplies, for y[M, N] = x[M, K] @ weight[N, K]^T,

    column-parallel (qkv, gate_up)  x[M, K] by weight[N / R, K], as an engine does
    row-parallel (o, down)          x[M, K] by weight[N / R, K]; an engine x[M, K / R] by
                                    weight[N, K / R], whose partial sums it adds up afterwards

Times are of the products alone: what ranks copy to each other is not in them. Shapes that no longer
fit into the time are left out, and it says how many.

M = rows   N, K = out and in features   R = ranks
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import rlk_kernels as rk
import torch
from product_shapes import DENSE
from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.errors import KernelError
from run import environment, head
from tables import geomean, table
from timing import copies, graphs_ms

DEVICE = torch.device("cuda")
MODELS = ("Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B", "Llama-3.1-70B")
RANKS = (2, 4, 8)
ROWS = (1, 16, 64, 256, 2048, 8192)
GOAL = 0.95


class Shard(NamedTuple):
    """What a rank multiplies; `own` is the (N, K) of an engine's weight."""

    model: str
    layer: str
    ranks: int
    m: int
    n: int
    k: int
    own: tuple[int, int]


def shards() -> Iterator[Shard]:
    """By rows first, so that a cut leaves whole shapes out and no model."""
    for m in ROWS:
        for ranks in RANKS:
            for model in MODELS:
                hidden, mlp, queries, kv, dim = DENSE[model]
                # Key-value heads fewer than ranks are replicated.
                qkv = (queries // ranks + 2 * max(1, kv // ranks)) * dim
                for layer, n in (("qkv", qkv), ("gate_up", 2 * mlp // ranks)):
                    yield Shard(model, layer, ranks, m, n, hidden, (n, hidden))
                for layer, k in (("o", queries * dim), ("down", mlp)):
                    n = hidden // ranks
                    yield Shard(model, layer, ranks, m, n, k, (hidden, k // ranks))


def noise(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)


def measure(shard: Shard) -> dict:
    """Microseconds of each, in turns."""
    (m, n, k), (own_n, own_k) = shard[3:6], shard.own
    sets = copies((n * k + m * k + m * n) * 2)
    products = [(noise(m, k), noise(n, k)) for _ in range(sets)]
    same = (own_n, own_k) == (n, k)
    own = products if same else [(noise(m, own_k), noise(own_n, own_k)) for _ in range(sets)]
    y, own_y = (torch.empty(m, w, device=DEVICE, dtype=torch.bfloat16) for w in (n, own_n))
    times = graphs_ms(
        {
            "rlk": [lambda x=x, w=w: rk.linear(x, w, out=y) for x, w in products],
            "cublas": [lambda x=x, w=w: torch.mm(x, w.T, out=own_y) for x, w in own],
        },
        target_ms=2.0,
    )
    return shard._asdict() | {"us": {rival: ms * 1e3 for rival, ms in times.items()}}


def compile_all(every: list[Shard]) -> None:
    rk.warm_up(str(DEVICE))
    with compiled_ahead(DEVICE):
        for shard in every:
            x, w, y = (
                torch.empty(*size, device=DEVICE, dtype=torch.bfloat16)
                for size in ((shard.m, shard.k), (shard.n, shard.k), (shard.m, shard.n))
            )
            rk.linear(x, w, out=y)


def copies_table() -> list[str]:
    """Weights of o and down of a rank, MB: computed. They are the [N / R, K] of the kernels."""
    rows = []
    for model in MODELS:
        hidden, mlp, queries, _, dim = DENSE[model]
        sizes = [[2 * hidden * k / r / 1e6 for k in (queries * dim, mlp)] for r in RANKS]
        rows.append([model] + [f"{o:.1f} + {down:.1f}" for o, down in sizes])
    return table(["o + down of one layer, MB", *(f"tp={r}" for r in RANKS)], rows)


def page(records: list[dict]) -> list[str]:
    rows = sorted({r["m"] for r in records})
    by = {(r["model"], r["layer"], r["ranks"], r["m"]): r["us"] for r in records}
    lines = ["Time of cuBLAS at the engine's shards / time of `linear`; microseconds of both:", ""]

    def cell(us: dict | None) -> str:
        if us is None:
            return ""
        ours, own = us["rlk"], us["cublas"]
        return f"{own / ours:.2f} ({own:.1f} / {ours:.1f})"

    lines += table(
        ["layer", "tp", *(f"M={m:,}" for m in rows)],
        [
            [
                f"{model} {layer}",
                str(ranks),
                *(cell(by.get((model, layer, ranks, m))) for m in rows),
            ]
            for model, layer, ranks in dict.fromkeys(key[:3] for key in by)
        ],
    )
    summary = []
    for kind, layers in (("column-parallel", ("qkv", "gate_up")), ("row-parallel", ("o", "down"))):
        for ranks in RANKS:
            row = [kind, str(ranks)]
            for m in rows:
                part = [
                    us["cublas"] / us["rlk"]
                    for (_, layer, r, rows_of), us in by.items()
                    if layer in layers and r == ranks and rows_of == m
                ]
                under = sum(not ratio >= GOAL for ratio in part)
                row.append(f"{geomean(part):.2f}, {under} of {len(part)}" if part else "")
            summary.append(row)
    lines += [f"Geometric mean of ratios, and how many are under {GOAL}:", ""]
    return lines + table(["", "tp", *(f"M={m:,}" for m in rows)], summary)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="of which compiling is a part")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=head())
    args = parser.parse_args()
    until, every = time.monotonic() + args.seconds, list(shards())
    compile_all(every)
    print(f"compiled; {until - time.monotonic():.0f} s are left", flush=True)
    records, failed = [], []
    for done, shard in enumerate(every):
        if time.monotonic() > until:
            print(f"the time is over: {len(every) - done} of {len(every)} shapes are left out")
            break
        try:
            records.append(measure(shard))
        except (RuntimeError, KernelError) as error:
            failed.append(f"{shard}: {error}")
            print(failed[-1], flush=True)
    record = {"environment": environment(args.commit), "shards": records, "failed": failed}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join([str(record["environment"]), *copies_table(), *page(records)]))
    return int(bool(failed) or not records)


if __name__ == "__main__":
    sys.exit(main())
