"""Fits the model of tiles' times (`rlk_kernels/matmul/tile_costs.py`) to measured times.

    PYTHONPATH=kernels python kernels/bench/fit_products.py reports/bench/product_times_*.jsonl

The input files were written by `tune_products.py`, on any number of cards: products of random
widths, and products of published models with random rows. The script fits the seven numbers of each
tile (`tile_time.py`), leaves out tiles that the choice does not need, and prints the loss of the
choice for products that were not in its fit. This takes four minutes on a CPU.
"""

import argparse
import json
import math
import random
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from product_tiles import CANDIDATES
from rlk_kernels.device import PLANNED_PROCESSORS as PROCESSORS
from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_time import TileCost, Work, microseconds, work_of

COPIES = {"NVIDIA H200": 4.2, "NVIDIA H100 80GB HBM3": 3.0}
"""Card -> terabytes a second that it copies. The costs are those of the first card."""
HEAD = '''"""Measured numbers of each tile, for `tile_time.py`: by kernels/bench/fit_products.py.

Of {cards}, {date}.
"""

from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_time import TileCost, costs_of

# fmt: off
COSTS = {{
'''


class Timed(NamedTuple):
    """A product with the times of its tiles."""

    kind: str
    m: int
    n: int
    k: int
    slower: float
    """The first card's memory bandwidth divided by this card's."""
    card: str
    us: dict[Tile, float]
    cublas: float


def load(path: Path) -> list[Timed]:
    """The products in a file of times, with the times of today's candidates."""
    head, *rows = map(json.loads, path.read_text().splitlines())
    made = [Tile(*fields) for fields in head["tiles"]]
    slower = COPIES["NVIDIA H200"] / COPIES[head["gpu"]]
    return [
        Timed(kind, m, n, k, slower, head["gpu"],
              {made[int(i)]: us for i, us in measured.items()
               if i.isdigit() and made[int(i)] in CANDIDATES},
              measured["cublas"])
        for kind, m, n, k, _, measured in rows
    ]  # fmt: skip


def expected(tile: Tile) -> list[float]:
    """A tile's numbers before any measurement, from the time of wgmma and of the copies of a step.
    No width of wgmma is faster than one of 32, and a processor reads 130 KB a microsecond from
    L2."""
    tall, flat = (tile.n, tile.m) if tile.swap else (tile.m, tile.n)
    cycles = -(-tall // 64) * max(flat, 32) / 2 / 16
    copied = 2 * (tile.m + tile.n) / 130e3
    step = 580 * ((cycles / 1700) ** 4 + copied**4) ** 0.25
    narrow = step * (tile.tail / tile.n * 2 if tile.tail else 0.01)
    start = 0.7 if tile.flatten or tile.warp_specialized else 1.65
    return [2.0, start, step, 1.1, 1.5, 0.26, narrow]


NEAR = 0.15
"""A tile that is slower than its product's best by this share counts e times less in the fit."""


def fit(rows: list[Timed], steps: int = 1000) -> dict[Tile, TileCost]:
    """Minimizes relative errors (Huber's) within each product, because the choice is between the
    tiles of one product: a common error of all of them counts little, and so do slow tiles. A
    penalty keeps each tile's numbers near those of its kind."""
    made = sorted({tile for row in rows for tile in row.us}, key=str)
    index = {tile: i for i, tile in enumerate(made)}
    which, work, us, products, weights = [], [], [], [], []
    for product, row in enumerate(rows):
        least = min(row.us.values())
        for tile, measured in row.us.items():
            asked = work_of(tile, row.m, row.n, row.k, PROCESSORS)
            which.append(index[tile])
            work.append([*asked[:-1], asked.megabytes * row.slower])
            us.append(measured)
            products.append(product)
            weights.append(math.exp((1 - measured / least) / NEAR))
    asked = Work(*torch.tensor(work, dtype=torch.float64).unbind(1))
    at, measured = torch.tensor(which), torch.tensor(us, dtype=torch.float64)
    product, weight = torch.tensor(products), torch.tensor(weights, dtype=torch.float64)

    def by_product(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.float64).index_add(0, product, x)

    counted = by_product(weight)
    prior = torch.tensor([expected(tile) for tile in made], dtype=torch.float64).log()
    common = torch.zeros(prior.shape[1], dtype=torch.float64, requires_grad=True)
    per_tile = torch.zeros_like(prior, requires_grad=True)
    optimizer = torch.optim.Adam([common, per_tile], lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        cost = TileCost(*(prior + common + per_tile).exp()[at].unbind(1))
        errors = (microseconds(cost, asked) / measured).log()
        means = by_product(weight * errors) / counted
        loss = (weight * _huber(errors - means[product])).sum() / counted.sum()
        loss = 100 * (loss + 0.05 * _huber(means).mean())
        (loss + 0.02 * per_tile.square().sum() / len(made)).backward()
        if step == 2 * steps // 3:
            optimizer.param_groups[0]["lr"] = 0.005
        optimizer.step()
    numbers = (prior + common + per_tile).detach().exp()
    return {tile: TileCost(*numbers[i].tolist()) for tile, i in index.items()}


def _huber(errors: torch.Tensor) -> torch.Tensor:
    none = torch.zeros_like(errors)
    return torch.nn.functional.huber_loss(errors, none, delta=0.1, reduction="none")


def predicted(costs: dict[Tile, TileCost], row: Timed) -> dict[Tile, float]:
    """The predicted microseconds of the tiles that were measured and that the fit contains."""
    predictions = {}
    for tile in costs.keys() & row.us.keys():
        work = work_of(tile, row.m, row.n, row.k, PROCESSORS)
        work = work._replace(megabytes=work.megabytes * row.slower)
        predictions[tile] = float(microseconds(costs[tile], work))
    return predictions


def unseen(rows: list[Timed], parts: int = 4) -> list[tuple[Timed, dict[Tile, float]]]:
    """Each product with the predictions of a fit that does not contain it."""
    mixed = rows[:]
    random.Random(0).shuffle(mixed)
    return [
        (row, predicted(costs, row))
        for part in range(parts)
        for costs in [fit([row for i, row in enumerate(mixed) if i % parts != part])]
        for row in mixed[part::parts]
    ]


def ranked(row: Timed, times: dict[Tile, float]) -> list[tuple[Tile, float]]:
    """(tile, its loss against the best tile), by predicted time; a loss counts three times where it
    exceeds 6 %."""
    least, losses = min(row.us.values()), []
    for tile in sorted(times, key=times.__getitem__):
        lost = min(NO_TILE_COST, row.us[tile] / least - 1)
        losses.append((tile, lost + 2 * max(0, lost - 0.06)))
    return losses


NO_TILE_COST = 0.6
"""The loss of a product that has no tile, and the largest loss of a tile."""


def loss(rows: list[list[tuple[Tile, float]]], among: set[Tile]) -> float:
    """The mean loss of the choice among some tiles."""
    none = NO_TILE_COST + 2 * (NO_TILE_COST - 0.06)
    firsts = (next((lost for tile, lost in row if tile in among), none) for row in rows)
    return sum(firsts) / len(rows)


def needed(rows: list[list[tuple[Tile, float]]], among: set[Tile]) -> set[Tile]:
    """The tiles that remain after the least needed ones are removed, one after another."""
    remaining, now = set(among), loss(rows, among)
    while len(remaining) > 1:
        least, _, tile = min(
            (loss(rows, remaining - {tile}), str(tile), tile) for tile in remaining
        )
        if least > now + 6e-5:
            break
        remaining, now = remaining - {tile}, least
    return remaining


def report(name: str, rows: list[tuple[Timed, dict[Tile, float]]], among: set[Tile]) -> None:
    lost, ratios = [], []
    for row, times in rows:
        chosen = min((tile for tile in times if tile in among), key=times.__getitem__)
        lost.append(row.us[chosen] / min(row.us.values()))
        ratios.append((row.cublas / row.us[chosen], row.m, row.n, row.k, chosen))
    mean = math.exp(sum(map(math.log, lost)) / len(lost))
    ratio = math.exp(sum(math.log(x[0]) for x in ratios) / len(ratios))
    under = sum(x[0] < 0.9 for x in ratios)
    print(f"{name}, {len(rows)} products: the best tile / the chosen one {1 / mean:.4f}; cuBLAS / "
          f"chosen {ratio:.4f}, {under} under 0.90")  # fmt: skip
    for margin, m, n, k, tile in sorted(ratios, key=lambda x: x[0])[:10]:
        print(f"  {margin:.3f}  M={m} N={n} K={k}  {tile.m} x {tile.n}, {tile.groups} groups")


def written(costs: dict[Tile, TileCost], among: set[Tile], cards: str, date: str) -> str:
    lines = [HEAD.format(cards=cards, date=date)]
    tables: dict[bool, list[str]] = {False: [], True: []}
    for tile in sorted(among, key=lambda t: (t.warp_specialized, t.swap, t.m * t.n, t.n)):
        fields = {"group": 8, "subtile": False, "flatten": False, "swap": False, "tail": 0}
        more = "".join(
            f", {name}={value}" for name, off in fields.items()
            if (value := getattr(tile, name)) != off
        )  # fmt: skip
        numbers = ", ".join(f"{x:.3g}" for x in costs[tile])
        shape = f"{tile.m}, {tile.n}, {tile.k}, {tile.warps}, {tile.stages}"
        if tile.warp_specialized:
            tables[tile.swap].append(f"        ({shape}): ({numbers}),\n")
        else:
            lines.append(f"    Tile({shape}{more}):\n        TileCost({numbers}),\n")
    for swap, rows in tables.items():
        lines += ["    **costs_of({\n", *rows, f"    }}, warp_specialized=True, swap={swap}),\n"]
    return "".join([*lines, "}\n# fmt: on\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("times", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default="kernels/rlk_kernels/matmul/tile_costs.py")
    parser.add_argument("--date", default=str(date.today()))
    arguments = parser.parse_args()
    rows = [row for path in arguments.times for row in load(path)]
    rows = [row for row in rows if row.us]
    validated = unseen(rows)
    every = {tile for row in rows for tile in row.us}
    plain = {tile for tile in every if not tile.warp_specialized}
    ranks = [ranked(*product) for product in validated]
    among = needed(ranks, every) | needed(ranks, plain)
    cards = sorted({row.card for row in rows})
    for kind in ("random", "published"):
        for card in cards:
            products = [x for x in validated if (x[0].kind, x[0].card) == (kind, card)]
            report(f"{kind}, {card}", products, among)
    costs = fit(rows)
    arguments.out.write_text(written(costs, among, " and ".join(cards), arguments.date))
    print(f"{len(among)} of {len(every)} tiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
