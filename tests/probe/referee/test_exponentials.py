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
"""The capabilities of torch's kernels; a processor without AVX-512 runs the last as AVX2."""


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
    exact, lost = reference._log_prob(logits.double(), RowTokens(target, target, target))
    square = (got.double()[:, None] - exact).square()
    unit = rounding_variance(exact, "float32") + lost
    return float((square.sum() / unit.sum()).sqrt()), float((square / unit).max().sqrt())


def running_total(logits: torch.Tensor, lanes: int, block: int) -> torch.Tensor:
    """Log-probs `[N]` of the tokens 0 ... N - 1, by float32 totals that grow side by side."""
    top = logits.amax(1, keepdim=True)
    terms = (logits - top).exp()
    terms = torch.nn.functional.pad(terms, (0, -terms.shape[1] % (lanes * block)))
    terms = terms.reshape(len(terms), -1, lanes, block).sum(dim=3)
    total = torch.zeros(len(logits), lanes)
    for added in terms.unbind(dim=1):
        total += added
    return logits.diagonal() - top[:, 0] - total.sum(dim=1).log()


@pytest.mark.parametrize(("lanes", "block"), [(1, 1024), (8, 1), (16, 1)])
@pytest.mark.parametrize("unseen", [-8.0, -13.0, -17.0])
def test_running_totals_of_blocks(tmp_path: Path, lanes: int, block: int, unseen: float) -> None:
    """Most of the vocabulary is unseen: each small term is lost in part, to the same side."""
    logits = confident(VOCAB // 8, unseen)
    got = running_total(logits, lanes, block)
    rms, row = errors(tmp_path, logits, got, SumOrder(lanes=lanes, block=block))
    assert 0.2 < rms < 1.3
    assert row < 3
    # Another temperature than the stated one is not explained by these errors.
    rms, _ = errors(tmp_path, logits / 1.001, got, SumOrder(lanes=lanes, block=block))
    assert rms > 20


@pytest.mark.parametrize("level", LEVELS)
def test_torchs_own_on_every_processor(tmp_path: Path, level: str) -> None:
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
    assert sum_orders(gpu) == (SumOrder(block=1024),)


def test_one_exponential_loses_nothing() -> None:
    row = torch.zeros(1, 1024, dtype=torch.float64)
    row[0, 3] = 1
    assert float(lost_share(row, sum_orders({}))) == 0
    assert math.isnan(float(lost_share(row * math.nan, sum_orders({}))))


@pytest.mark.parametrize("orders", [sum_orders({}), (SumOrder(block=1024),)])
def test_exponentials_too_small_for_float32_lose_nothing_that_counts(
    orders: tuple[SumOrder, ...],
) -> None:
    """Like logits without a final norm: differences of hundreds, down to the smallest float64."""
    row = torch.linspace(-800, 0, 4096, dtype=torch.float64)[None].exp()
    assert 0 < float(lost_share(row, orders)) < 2.0**-40
