"""The benchmark of products by expert times no wrong product."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
COUNTS = [3, 0, 5, 1]


@pytest.fixture(scope="module")
def grouped() -> Any:
    with mock.patch.object(sys, "path", [str(ROOT / "kernels" / "bench"), *sys.path]):
        import grouped_products
    return grouped_products


@pytest.fixture(scope="module")
def task(grouped: Any) -> Any:
    torch.manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    rows, experts = sum(COUNTS), len(COUNTS)
    up, down = values(experts, 64, 48), values(experts, 48, 32)
    return grouped.Task(values(rows, 48), up, values(rows, 32), down, COUNTS)


@pytest.mark.parametrize("name", ["by_cublas", "by_grouped_mm"])
def test_right_products_pass(grouped: Any, task: Any, name: str) -> None:
    grouped.check(getattr(grouped, name)(task), grouped.exact(task))


def swapped(rows: Tensor) -> Tensor:
    return rows[[1, 0, *range(2, len(rows))]]


def one_value_is_no_number(rows: Tensor) -> Tensor:
    return rows.index_put((torch.tensor(4), torch.tensor(7)), torch.tensor(float("nan")).bfloat16())


def of_another_expert(rows: Tensor) -> Tensor:
    return torch.cat((rows[:-1], rows[:1]))


@pytest.mark.parametrize("fault", [swapped, one_value_is_no_number, of_another_expert])
@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_row_is_caught(
    grouped: Any, task: Any, fault: Callable[[Tensor], Tensor], which: int
) -> None:
    products = grouped.by_cublas(task)

    def run() -> tuple[Tensor, ...]:
        results = products.run()
        return tuple(fault(rows) if i == which else rows for i, rows in enumerate(results))

    with pytest.raises(ArithmeticError, match=("first", "second")[which]):
        grouped.check(products._replace(run=run), grouped.exact(task))


def test_no_rows_do_not_pass(grouped: Any, task: Any) -> None:
    none = task._replace(x=task.x[:0], inner=task.inner[:0], counts=[0] * len(COUNTS))
    with pytest.raises(ArithmeticError, match="0 of 0"):
        grouped.check(grouped.by_cublas(none), grouped.exact(none))
