"""Times linear beside cuBLAS, over layers of published models with random numbers of rows."""

import rlk_kernels as rk
import torch
from product_shapes import products
from rlk_kernels.ahead import compiled_ahead
from timing import copies, graphs_ms, rand

SEED, COUNT = 43, 220
"""The seed and the size of a draw that no tile was tuned on."""


def measure(ceilings: dict) -> list[dict]:
    """A record for each product, with the microseconds of each rival."""
    records = []
    drawn = products(SEED, COUNT)
    rk.warm_up("cuda")
    with compiled_ahead(torch.device("cuda")), torch.device("cuda"):
        for m, n, k, _ in drawn:
            x, w = (torch.empty(rows, k, dtype=torch.bfloat16) for rows in (m, n))
            rk.linear(x, w, out=torch.empty(m, n, dtype=torch.bfloat16))
    for m, n, k, name in drawn:
        sets = copies((n * k + m * k + m * n) * 2)
        pairs = [(rand(m, k), rand(n, k)) for _ in range(sets)]
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        calls = {
            "rlk": [lambda x=x, w=w, y=y: rk.linear(x, w, out=y) for x, w in pairs],
            "cublas": [lambda x=x, w=w, y=y: torch.mm(x, w.T, out=y) for x, w in pairs],
        }
        us = {rival: ms * 1e3 for rival, ms in graphs_ms(calls, target_ms=2.0).items()}
        records.append({"name": name, "m": m, "n": n, "k": k, "us": us})
    return records
