"""The loop's trainer by CUDA graphs has the bits that it has without them, on a GPU."""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "grpo"))

from batch import Sample, packs
from ranks import Ranks
from train import arguments
from trainer import Trainer

GPU = torch.device("cuda")


def samples(*lengths: int) -> list[Sample]:
    made = torch.Generator().manual_seed(sum(lengths))
    return [
        Sample(
            torch.randint(2, 200, (n,), generator=made).tolist(), 2, [False] * 2 + [True] * (n - 2),
            [None] * 2 + [-1.5] * (n - 2), 1.0 - number % 3,
        )
        for number, n in enumerate(lengths)
    ]  # fmt: skip


def updates(*words: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(log-probs and entropies of three updates, master weights behind them): two packs of one
    length, then of another with fewer sequences, then the first again."""
    common = [
        "--run",
        "none",
        "--device",
        "cuda",
        "--problems",
        "4",
        "--group",
        "8",
        "--pack-tokens",
        "1024",
    ]
    options = arguments([*common, *words])
    trainer = Trainer(options, Ranks(GPU), lambda _stage: nullcontext())
    trainer.prepare()
    seen: list[torch.Tensor] = []
    for lengths in ([60, 70, 33] * 10, [100, 200], [61, 59, 31] * 10):
        row = list(packs(samples(*lengths), options.pack_tokens, GPU))
        scored, _ = trainer.update(row)
        seen += [x for both in scored for x in both]
    return seen, list(trainer.masters.values())


def test_graphs_change_no_bit() -> None:
    expected, found = updates(), updates("--graphs")
    assert len(found[0]) == len(expected[0]) == 10
    for one, other in zip(expected, found, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
        assert all(a.isfinite().all() for a in one)
