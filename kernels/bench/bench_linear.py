"""linear against cuBLAS (torch.mm) and cuBLASLt with 1 KiB of workspace, in one process."""

import rlk_kernels as rk
import torch
from shapes import LINEAR, ROWS
from timing import copies, graphs_ms


def starved(x, w, out):
    """torch.mm through cuBLASLt; its workspace was set before torch was imported."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return torch.mm(x, w.T, out=out)
    finally:
        torch.backends.cuda.preferred_blas_library("cublas")


def invariant(run, n: int, k: int) -> bool:
    """Whether the first rows keep their bits at every M."""
    x = torch.randn(8192, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    whole = run(x, w)
    return all(torch.equal(run(x[:m], w), whole[:m]) for m in ROWS)


def measure(ceilings: dict) -> list[dict]:
    """One record a shape: microseconds of each, the ratio, the share of the ceiling."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for model, layers in LINEAR.items():
        for layer, shape in layers.items():
            shapes.setdefault(shape, []).append(f"{model} {layer}")
    records = []
    for (n, k), names in shapes.items():

        def out_for(x, n=n):
            return torch.empty(x.shape[0], n, device="cuda", dtype=torch.bfloat16)

        checks = {
            "rlk": invariant(rk.linear, n, k),
            "cublas": invariant(lambda x, w: torch.mm(x, w.T), n, k),
            "starved": invariant(lambda x, w: starved(x, w, out_for(x)), n, k),
        }
        for m in ROWS:
            count = copies((n * k + m * k + m * n) * 2)
            xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            pairs = list(zip(xs, ws, strict=True))
            calls = {
                "rlk": [lambda x=x, w=w: rk.linear(x, w) for x, w in pairs],
                "cublas": [lambda x=x, w=w, y=y: torch.mm(x, w.T, out=y) for x, w in pairs],
                "starved": [lambda x=x, w=w, y=y: starved(x, w, y) for x, w in pairs],
            }
            us = {name: ms * 1e3 for name, ms in graphs_ms(calls).items()}
            floor = max(
                2 * m * n * k / ceilings["tflops"] / 1e6,
                2 * (m * k + n * k + m * n) / ceilings["copy_gbs"] / 1e3,
            )
            records.append(
                {
                    "names": names, "n": n, "k": k, "m": m, "us": us,
                    "ratio": us["cublas"] / us["rlk"],
                    "ratio_starved": us["starved"] / us["rlk"],
                    "ceiling_share": floor / us["rlk"], "invariant": checks,
                }
            )  # fmt: skip
    return records
