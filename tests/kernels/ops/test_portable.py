"""The portable backend: errors, batch invariance bit for bit, thread counts."""

import pytest
import torch
from kernel_suite import ROWS, differing_rows, row_operators, within_budget

NAMES = list(row_operators(torch.float32, "cpu"))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_error_is_no_larger_than_torchs(name, dtype):
    op = row_operators(dtype, "cpu")[name]
    rows = op.make(65)
    value, truth = op.run(*rows, backend="torch"), op.truth(*rows)
    wide = name in ("logp", "linear_fp32_out")
    assert within_budget(value, truth, op.torch_run(*rows), torch.float32 if wide else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch(name, dtype):
    op = row_operators(dtype, "cpu")[name]
    rows = op.make(1000)
    for m in ROWS:
        for first in {0, 1, 500 - m // 2, 1000 - m} if m < 1000 else {0}:
            picked = torch.arange(max(first, 0), max(first, 0) + m)
            if picked[-1] < 1000:
                assert differing_rows(op, "torch", rows, picked) == 0, (m, first)
    assert differing_rows(op, "torch", rows, torch.randperm(1000)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_number_of_threads(name, threads):
    op = row_operators(torch.float32, "cpu", size=300)[name]
    rows = op.make(300)
    threads(1)
    one = op.run(*rows, backend="torch")
    for count in (2, 3, 4):
        threads(count)
        assert torch.equal(op.run(*rows, backend="torch"), one)


def test_a_plain_blas_product_would_fail_this_test(threads):
    """The control group: torch's own product does depend on the batch or on the threads."""
    differs = 0
    for n, k in ((64, 64), (96, 4096), (333, 777), (1024, 256), (17, 300)):
        x, w = torch.randn(129, k), torch.randn(n, k)
        threads(1)
        whole = x @ w.T
        for m in (1, 2, 3, 7, 16, 17, 33):
            differs += not torch.equal(x[:m] @ w.T, whole[:m])
        threads(2)
        differs += not torch.equal(x @ w.T, whole)
    assert differs > 0
