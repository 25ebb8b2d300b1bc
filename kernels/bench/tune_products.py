"""Times every candidate tile of `linear`, over products drawn at random.

    PYTHONPATH=kernels python kernels/bench/tune_products.py times.jsonl [--seconds 90]

Needs an NVIDIA GPU of the Hopper generation. The script compiles the candidates in parallel and
drops those whose bits differ from SAFE's. Then it writes a line for each product, with the
microseconds of each plausible tile and of cuBLAS: products of random widths ("random"), and layers
of published models ("published"). `fit_products.py` fits the model of costs to these times.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import astuple, replace
from multiprocessing import get_context
from pathlib import Path

from fit_products import expected
from product_shapes import Product, products, widths_at_random
from product_tiles import CANDIDATES
from rlk_kernels.device import PLANNED_PROCESSORS as PROCESSORS
from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_costs import COSTS
from rlk_kernels.matmul.tile_time import TileCost, microseconds, work_of
from rlk_kernels.matmul.tiles import SAFE, tile_for, with_overlap


def runner(tile: Tile, x, weight, y):
    """A call that computes y = x @ weight^T with `tile`."""
    from rlk_kernels.device import facts
    from rlk_kernels.launching import ShapeCache
    from rlk_kernels.matmul.launch import launch
    from rlk_kernels.matmul.plan import plan_tile, shape_of

    here, cache = facts(x.device), ShapeCache()
    plan = plan_tile(shape_of(x, weight, False, True, y, here), here, tile)
    return lambda x=x, weight=weight: launch(plan, cache, x, weight, None, False, True, y)


def compiled(index: int) -> tuple[int, str]:
    """Compiles a candidate as products launch it: (its index, what is wrong with it, or "")."""
    import torch
    from rlk_kernels.matmul.self_check import tile_bits

    tile, gpu = CANDIDATES[index], torch.device("cuda")
    try:
        safe = tile_bits(SAFE, torch.bfloat16, gpu)
        if not torch.equal(tile_bits(tile, torch.bfloat16, gpu), safe):
            return index, "its bits are not SAFE's"
        x, weight = (torch.randn(n, 2048, device=gpu, dtype=torch.bfloat16) for n in (200, 512))
        y = torch.full((200, 512), float("nan"), device=gpu, dtype=torch.bfloat16)
        for overlap in (1, 2):
            runner(replace(tile, overlap=overlap), x, weight, y)()
            if not torch.allclose(y.float(), x.float() @ weight.float().T, rtol=0.01, atol=0.1):
                return index, "its product is wrong"
            y.fill_(float("nan"))
    except Exception as error:  # of any kind: the tile is no candidate then
        return index, f"{type(error).__name__}: {str(error)[:200]}"
    return index, ""


def usable() -> list[int]:
    """The indices of the candidates that compile here and have SAFE's bits."""
    indices = []
    with get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        for index, wrong in pool.imap_unordered(compiled, range(len(CANDIDATES))):
            if wrong:
                print(f"{CANDIDATES[index]}: {wrong}", flush=True)
            else:
                indices.append(index)
    return sorted(indices)


def _guess(tile: Tile, m: int, n: int, k: int) -> float:
    """Microseconds by the model of costs, also of a tile that was never measured: exact enough to
    leave out tiles that cannot win."""
    cost = COSTS.get(tile) or TileCost(*expected(tile))
    return microseconds(cost, work_of(tile, m, n, k, PROCESSORS))


def plausible(shape: Product, among: list[int], most: int) -> list[int]:
    """The `most` candidates that are worth a measurement, best guesses first."""
    m, n, k = shape[:3]
    fits = [i for i in among if m > 32 or CANDIDATES[i].m <= 64]
    fits = [i for i in fits if not CANDIDATES[i].tail or m * n >= 128 * 256 * PROCESSORS]
    guessed = {i: _guess(CANDIDATES[i], m, n, k) for i in fits}
    least = min(guessed.values())
    return sorted((i for i in fits if guessed[i] <= 1.5 * least), key=guessed.__getitem__)[:most]


def gather(
    out: Path, among: list[int], kinds: list[str], seconds: float, count: int, most: int,
    seed: int,
) -> None:  # fmt: skip
    import torch
    from timing import copies, graphs_ms

    pool = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    written = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16)

    def views(rows: int, k: int, copy: int, begin: int = 0):
        size, room = -(-rows * k // 64) * 64, pool.numel() - rows * k
        return pool[(begin + copy * size) % room // 64 * 64 :][: rows * k].view(rows, k)

    def measure(shape: Product, tiles: dict[str, Tile]) -> dict[str, float]:
        m, n, k = shape[:3]
        sets = range(copies((n * k + m * k + m * n) * 2))
        pairs = [(views(m, k, i), views(n, k, i, len(sets) * m * k)) for i in sets]
        y = written[: m * n].view(m, n)
        calls = {}
        for name, tile in tiles.items():
            run = runner(tile, *pairs[0], y)
            calls[name] = [lambda x=x, w=w, run=run: run(x, w) for x, w in pairs]
        calls["cublas"] = [lambda x=x, w=w: torch.mm(x, w.T, out=y) for x, w in pairs]
        times = graphs_ms(calls, repeat=3, target_ms=1.0)
        return {name: round(ms * 1e3, 3) for name, ms in times.items()}

    begun, done = time.monotonic(), 0
    drawn = {"random": widths_at_random(seed, count), "published": products(seed, count)}
    with out.open("a") as lines:
        for shapes in zip(*(drawn[kind] for kind in kinds), strict=True):
            for kind, shape in zip(kinds, shapes, strict=True):
                m, n, k = shape[:3]
                tiles = {
                    str(i): with_overlap(CANDIDATES[i], m, n, k, PROCESSORS)
                    for i in plausible(shape, among, most)
                }
                if kind == "published":
                    tiles["now"] = tile_for(m, n, k, torch.bfloat16, PROCESSORS)
                us = measure(shape, tiles)
                lines.write(json.dumps([kind, m, n, k, shape.name, us]) + "\n")
                done += 1
            lines.flush()
            if time.monotonic() - begun > seconds:
                break
    print(f"{done} products in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", default="random,published")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--count", type=int, default=220, help="products of each kind")
    parser.add_argument("--most", type=int, default=14, help="tiles timed for a product")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun = time.monotonic()
    among = usable()
    print(f"{len(among)} of {len(CANDIDATES)} tiles, {time.monotonic() - begun:.0f} s", flush=True)
    import torch

    tiles = [astuple(tile) for tile in CANDIDATES]
    head = {"gpu": torch.cuda.get_device_name(), "tiles": tiles, "usable": among}
    arguments.out.write_text(json.dumps(head) + "\n")
    gather(
        arguments.out, among, arguments.kinds.split(","), arguments.seconds, arguments.count,
        arguments.most, arguments.seed,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
