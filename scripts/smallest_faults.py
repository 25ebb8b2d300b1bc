#!/usr/bin/env python3
"""Finds the smallest faults of a product that its bf16 budget detects, for each width of its rows.

    python scripts/smallest_faults.py

Each fault changes 1,000 rows of normal outputs, which are then rounded to bf16. Strengths are a
factor of 1.5 apart. The script prints the smallest strength above which every strength is detected.
It starts no engine.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlk_align.judge.budgets import exceeded
from rlk_align.judge.load import load_contract
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.sites import RowIndex
from rlk_align.probe.referee.rounding import ErrorSums, rounding_variance
from rlk_align.results import RefereedUnit

ROWS, BLOCK = 1000, 250
WIDTHS = (32, 64, 256, 1024, 4096)
LARGEST, SMALLEST, STEP = 0.3, 2e-5, 1.5
ROW, FEATURE = 7, 5
CONTRACT = load_contract("bf16", "bfloat16")
INDEX = RowIndex(TokenBatch((Sample("rows", tuple(range(ROWS)), (0,)),)))
CPU = torch.device("cpu")


def at(where: tuple, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A fault that changes only the entries at `where`."""

    def changed(exact: Tensor) -> Tensor:
        exact[where] = change(exact[where])
        return exact

    return changed


def faults(strength: float, by_row: Tensor, by_entry: Tensor) -> dict[str, Callable]:
    """Name -> fault. by_row[ROWS, 1] and by_entry[ROWS, F] are normal numbers."""

    def scaled(x: Tensor) -> Tensor:
        return x * (1 + strength)

    return {
        "all scaled": scaled,
        "all shifted": lambda x: x + strength,
        "a quarter of the features scaled": at(
            (slice(None), slice(by_entry.shape[1] // 4)), scaled
        ),
        "each row scaled otherwise": lambda x: x * (1 + strength * by_row),
        "each entry scaled otherwise": lambda x: x * (1 + strength * by_entry),
        "one row scaled": at((ROW,), scaled),
        "one row, each entry otherwise": at((ROW,), lambda x: x * (1 + strength * by_entry[ROW])),
        "one feature scaled": at((slice(None), FEATURE), scaled),
        "one feature shifted": at((slice(None), FEATURE), lambda x: x + strength),
        "one entry": at((ROW, FEATURE), scaled),
    }


def is_detected(exact: Tensor, fault: Callable[[Tensor], Tensor]) -> bool:
    got = fault(exact.clone()).bfloat16().double()
    sums = ErrorSums(exact.shape[1], 1, "bfloat16", CPU)
    for start in range(0, ROWS, BLOCK):
        rows = slice(start, start + BLOCK)
        variance = rounding_variance(exact[rows], "bfloat16")
        nothing = exact.new_zeros(BLOCK, 1)
        sums.add(got[rows], exact[rows], variance, nothing, np.arange(ROWS)[rows])
    unit = RefereedUnit(
        side="train", passname="prefill", edges=["prefill_vs_train"], site="layers.0.down_proj",
        layer=0, op="down_proj", op_class="matmul", rows=ROWS, errors=sums.errors(INDEX),
        dtype="bfloat16",
    )  # fmt: skip
    return bool(exceeded(CONTRACT, unit))


def smallest(name: str, exact: Tensor, by_row: Tensor, by_entry: Tensor) -> float:
    strength, detected = LARGEST, float("nan")
    while strength > SMALLEST and is_detected(exact, faults(strength, by_row, by_entry)[name]):
        strength, detected = strength / STEP, strength
    return detected


def main() -> None:
    lines = {name: [] for name in faults(0.0, torch.zeros(1), torch.zeros(ROWS, 1))}
    for width in WIDTHS:
        draw = torch.Generator().manual_seed(width)
        exact = torch.randn(ROWS, width, generator=draw).double()
        by_row = torch.randn(ROWS, 1, generator=draw).double()
        by_entry = torch.randn(ROWS, width, generator=draw).double()
        for name, line in lines.items():
            line.append(f"{smallest(name, exact, by_row, by_entry):.2g}")
    print(f"| fault | {' | '.join(f'{width:,}' for width in WIDTHS)} |")
    print(f"| --- |{' ---: |' * len(WIDTHS)}")
    for name, line in lines.items():
        print(f"| {name} | {' | '.join(line)} |")


if __name__ == "__main__":
    main()
