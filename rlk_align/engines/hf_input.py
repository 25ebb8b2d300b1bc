"""Which sequences enter one forward of an HF model, and how they are padded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlk_align.config import EngineSpec
from rlk_align.engines.hf_taps import Rows
from rlk_align.prompts import TokenBatch


@dataclass(frozen=True, slots=True)
class Padded:
    """Several sequences in one rectangle."""

    ids: np.ndarray
    """int64 `[sequences, length]`."""
    rows: Rows
    first: list[int]
    """Per sequence, the column of its position 0."""


def chunks(samples: Sequence[int], spec: EngineSpec) -> Iterator[Sequence[int]]:
    """Samples by forward, as many as the spec's `batch`."""
    size = int(spec.options.get("batch", 1))
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def pad(batch: TokenBatch, members: Sequence[int], side: str) -> Padded:
    """These samples in one rectangle, padded on one side with id 0."""
    sequences = [batch.samples[i] for i in members]
    width = max(len(s.ids) for s in sequences)
    first = [width - len(s.ids) if side == "left" else 0 for s in sequences]
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    position = np.arange(width) - np.array(first)[:, None]
    real = np.zeros(ids.shape, dtype=bool)
    sampled = np.zeros(ids.shape, dtype=bool)
    for k, s in enumerate(sequences):
        ids[k, first[k] : first[k] + len(s.ids)] = s.ids
        real[k, first[k] : first[k] + len(s.ids)] = True
        wanted = s.sampled_positions
        sampled[k, first[k] + wanted.start : first[k] + wanted.stop] = True
    sample = np.repeat(np.array(members), width)
    rows = Rows(sample, position.reshape(-1), real.reshape(-1), sampled.reshape(-1))
    return Padded(ids, rows, first)


def padding_side(spec: EngineSpec) -> dict[str, Any]:
    """Where sequences of one forward are padded; None where a forward has one sequence."""
    alone = int(spec.options.get("batch", 1)) == 1
    return {"padding_side": None if alone else spec.options.get("padding", "right")}
