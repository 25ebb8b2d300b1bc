"""The loop's trainer by CUDA graphs has the bits that it has without them, on a GPU."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "grpo"))

from batch import Pack, Sample, packs
from options import arguments
from passes import Graphs
from ranks import Ranks
from trainer import Trainer

GPU = torch.device("cuda")
COMMON = "--run none --device cuda --problems 4 --group 8 --pack-tokens 1024 --lr 1e-3"
STEPS = ([60, 70, 33] * 10, [100, 200], [61, 59, 31] * 10, [300, 90, 110])
"""The lengths of each step's samples: two packs of 1024 tokens, one of 512 with fewer sequences,
and both lengths again, with others."""


def samples(lengths: list[int]) -> list[Sample]:
    made = torch.Generator().manual_seed(sum(lengths))
    return [
        Sample(
            torch.randint(2, 200, (n,), generator=made).tolist(), 2, [False] * 2 + [True] * (n - 2),
            [None] * 2 + (torch.randn(n - 2, generator=made) / 8 - 5).tolist(), 1.0 - number % 3,
        )
        for number, n in enumerate(lengths)
    ]  # fmt: skip


def updates(*words: str) -> list[torch.Tensor]:
    """Log-probs and entropies of each step's packs, the gradient's norm of each step, and the
    master weights behind them."""
    options = arguments([*COMMON.split(), *words])
    trainer = Trainer(options, Ranks(GPU), lambda _stage: nullcontext())
    trainer.prepare()
    seen: list[torch.Tensor] = []
    for lengths in STEPS:
        row = list(packs(samples(lengths), options.pack_tokens, GPU))
        scored, norm = trainer.update(row)
        seen += [*(x for both in scored for x in both), torch.tensor(norm)]
    assert len(seen) == 2 * 6 + len(STEPS)
    seen += trainer.masters.values()
    assert all(x.isfinite().all() for x in seen)
    return seen


def differing(one: list[torch.Tensor], other: list[torch.Tensor]) -> int:
    """How many tensors have other bits."""
    assert len(one) == len(other)
    return sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def eager() -> list[torch.Tensor]:
    return updates()


def test_graphs_change_no_bit(eager: list[torch.Tensor]) -> None:
    assert differing(eager, updates("--graphs")) == 0


def test_weights_move(eager: list[torch.Tensor]) -> None:
    """Equal bits say something only where steps change the weights."""
    start = Trainer(arguments(COMMON.split()), Ranks(GPU), lambda _stage: nullcontext()).masters
    assert differing(list(start.values()), eager[-len(start) :]) == len(start)


@pytest.mark.parametrize("stale", ["ids", "mask", "advantages", "rollout_logprobs"])
def test_a_tensor_that_is_not_copied_shows(
    eager: list[torch.Tensor], stale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: graphs go on with what their first pack had."""
    filled, captured = Graphs._filled, set()

    def faulty(self: Graphs, pack: Pack) -> dict[str, torch.Tensor]:
        found, length = filled(self, pack), pack.ids.shape[1]
        if length in captured:
            del found[stale]
        captured.add(length)
        return found

    monkeypatch.setattr(Graphs, "_filled", faulty)
    assert differing(eager, updates("--graphs")) > 0
