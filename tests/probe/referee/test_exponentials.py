"""The errors of float32 sums of exponentials, predicted and measured on torch's log-softmax."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import checkpoint

from rlk_align.model.shape import read_shape
from rlk_align.probe.referee.exponentials import SumOrder, lost_share, sum_orders
from rlk_align.probe.referee.reference import Reference, RowTokens
from rlk_align.probe.referee.rounding import rounding_variance

VOCAB = 151_936
LEVELS = (
    "default",
    *(pytest.param(level, marks=pytest.mark.whole_matrix) for level in ("avx2", "avx512")),
)
"""The capabilities of torch's kernels."""
PLATFORM = torch.backends.cpu.get_cpu_capability()


def confident(vocab: int, unseen: float, rows: int = 64) -> torch.Tensor:
    """Logits `[rows, vocab]` of which one is far above the rest, whose tail lies about `unseen`."""
    random = torch.Generator().manual_seed(0)
    logits = 0.3 * torch.randn(rows, vocab, generator=random) + unseen
    logits[:, :512] = 2.5 * torch.randn(rows, 512, generator=random) - 3
    logits[:, 0] = 6
    return logits[:, torch.randperm(vocab, generator=random)].bfloat16().float()


def errors(
    folder: Path, logits: torch.Tensor, got: torch.Tensor, *orders: SumOrder
) -> tuple[float, float]:
    """The rms of log-probs `[N]` of the tokens 0 ... N - 1, in units, and that of the worst row."""
    made = checkpoint(folder / "model", "qwen3")
    shape = read_shape(made)
    reference = Reference(made, shape, "bfloat16", 1, {}, {}, torch.device("cpu"), orders=orders)
    target = torch.arange(len(logits))
    exact, lost = reference._log_prob(logits.double(), RowTokens(target, target, target, target))
    square = (got.double()[:, None] - exact).square()
    unit = rounding_variance(exact, "float32") + lost
    return float((square.sum() / unit.sum()).sqrt()), float((square / unit).max().sqrt())


def running_total(logits: torch.Tensor, lanes: int, block: int, vector: int = 1) -> torch.Tensor:
    """Log-probs `[N]` of the tokens 0 ... N - 1, by float32 totals that grow side by side."""
    top = logits.amax(1, keepdim=True)
    terms = (logits - top).exp()
    terms = torch.nn.functional.pad(terms, (0, -terms.shape[1] % (lanes * block * vector)))
    terms = terms.reshape(len(terms), -1, lanes, vector, block).sum(dim=4)
    terms = terms.transpose(2, 3).flatten(1, 2)
    total = torch.zeros(len(logits), lanes)
    for added in terms.unbind(dim=1):
        total += added
    return logits.diagonal() - top[:, 0] - total.sum(dim=1).log()


@pytest.mark.parametrize("order", [(1, 1024), (8, 1), (16, 1), (64, 1, 4)])
@pytest.mark.parametrize("unseen", [-8.0, -13.0, -17.0])
def test_running_totals_of_blocks(tmp_path: Path, order: tuple[int, ...], unseen: float) -> None:
    """Most of the vocabulary is unseen: each small term is lost in part, to the same side."""
    logits = confident(VOCAB // 8, unseen)
    got = running_total(logits, *order)
    rms, row = errors(tmp_path, logits, got, SumOrder(*order))
    assert 0.2 < rms < 1.3
    assert row < 3
    # Another temperature than the stated one is not explained by these errors.
    rms, _ = errors(tmp_path, logits / 1.001, got, SumOrder(*order))
    assert rms > 20


def test_equal_terms_in_threads_lose_more_than_in_blocks(tmp_path: Path) -> None:
    """A large vocabulary of which most is unseen, as torch adds it on a GPU: the order of blocks
    alone does not explain its errors."""
    logits = 0.1 * torch.randn(8, 262_208, generator=torch.Generator().manual_seed(0)) - 6
    logits[:, 0] = torch.linspace(9, 12, 8)
    logits = logits.bfloat16().float()
    got = running_total(logits, 1024, 1, 4)
    _, explained = errors(tmp_path / "a", logits, got, *sum_orders({"device_type": "cuda"}))
    _, by_blocks = errors(tmp_path / "b", logits, got, SumOrder(block=1024))
    assert explained < 3 < 5 < by_blocks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocab", [5_000, VOCAB, 262_208])
@pytest.mark.parametrize("unseen", [-6.0, -8.0, -13.0, -17.0])
def test_torchs_own_on_a_gpu(tmp_path: Path, vocab: int, unseen: float) -> None:
    logits = confident(vocab, unseen)
    got = torch.log_softmax(logits.cuda(), dim=-1).cpu().diagonal()
    rms, row = errors(tmp_path, logits, got, *sum_orders({"device_type": "cuda"}))
    assert rms < 1.3
    assert row < 3


@pytest.mark.parametrize("level", LEVELS)
def test_torchs_own_on_every_processor(tmp_path: Path, level: str) -> None:
    if level == "avx512" and PLATFORM != "AVX512":
        pytest.skip(f"this processor has {PLATFORM}")
    code = """
import sys
import torch
logits = torch.load(sys.argv[1])
got = [torch.log_softmax(x, dim=-1).diagonal() for x in logits]
torch.save((torch.backends.cpu.get_cpu_capability(), got), sys.argv[2])
"""
    logits = [confident(vocab, u) for vocab in (1024, VOCAB) for u in (-8.0, -13.0, -17.0)]
    torch.save(logits, tmp_path / "logits.pt")
    command = [sys.executable, "-c", code, str(tmp_path / "logits.pt"), str(tmp_path / "got.pt")]
    subprocess.run(command, check=True, env=os.environ | {"ATEN_CPU_CAPABILITY": level})
    capability, got = torch.load(tmp_path / "got.pt")
    for number, (given, logprob) in enumerate(zip(logits, got, strict=True)):
        orders = sum_orders({"capability": capability})
        rms, row = errors(tmp_path / str(number), given, logprob, *orders)
        assert rms < 1.3
        assert row < 3


def test_the_order_by_what_a_capture_recorded() -> None:
    assert sum_orders({"capability": "AVX512"}) == (SumOrder(lanes=16),)
    assert sum_orders({"capability": "AVX2"}) == (SumOrder(lanes=8),)
    assert sum_orders({}) == sum_orders({"capability": "DEFAULT"}) == (SumOrder(4), SumOrder(8))
    gpu = {"device_type": "cuda", "capability": "AVX2"}
    assert sum_orders(gpu) == (SumOrder(block=1024), SumOrder(1024, vector=4))


def test_one_exponential_loses_nothing() -> None:
    row = torch.zeros(1, 1024, dtype=torch.float64)
    row[0, 3] = 1
    assert float(lost_share(row, sum_orders({}))) == 0
    assert math.isnan(float(lost_share(row * math.nan, sum_orders({}))))


@pytest.mark.parametrize("orders", [sum_orders({}), sum_orders({"device_type": "cuda"})])
def test_exponentials_too_small_for_float32_lose_nothing_that_counts(
    orders: tuple[SumOrder, ...],
) -> None:
    """Like logits without a final norm: differences of hundreds, down to the smallest float64."""
    row = torch.linspace(-800, 0, 4096, dtype=torch.float64)[None].exp()
    assert 0 < float(lost_share(row, orders)) < 2.0**-40
