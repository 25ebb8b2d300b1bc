"""One forward's input, padded or packed, and where each row of its output belongs.

B = sequences of the input tensor, S = its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlk_align.prompts import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """What GPTModel takes, and the rows that are no padding, by sample and position."""

    ids: torch.Tensor
    """int64 `[B, S]`; padding is id 0."""
    positions: torch.Tensor
    """int64 `[B, S]`; 0 at padding."""
    mask: torch.Tensor | None
    """bool `[B or 1, 1, S, S]`, True where query may not see key; None where packed."""
    packed: Any
    """PackedSeqParams, or None where padded."""
    rows: torch.Tensor
    """int64 `[N]`: the rows of a `[S, B]` tensor, flattened, that are no padding."""
    sample: np.ndarray
    position: np.ndarray
    """Of each row, sorted by both."""
    sampled: torch.Tensor
    """int64: which of `rows` have their next token sampled."""
    targets: torch.Tensor
    """int64: that token."""


def padded_input(
    samples: Sequence[tuple[int, Sample]], side: str, multiple: int, device: torch.device
) -> ModelInput:
    """One sequence a row, padded on `side` to the longest, rounded up to `multiple`."""
    longest = max(len(s.ids) for _, s in samples)
    grid = _Grid(len(samples), -(-longest // multiple) * multiple)
    for row, (i, s) in enumerate(samples):
        grid.put(row, 0 if side == "right" else grid.length - len(s.ids), i, s)
    hidden = torch.ones(grid.length, grid.length, dtype=torch.bool, device=device).triu(1)[None]
    if side == "left":
        # On the right padding is never seen: it comes after every query that counts.
        hidden = hidden | torch.from_numpy(grid.owner < 0).to(device)[:, None, :]
    return grid.finish(hidden[:, None], None, device)


def packed_input(
    samples: Sequence[tuple[int, Sample]], multiple: int, device: torch.device
) -> ModelInput:
    """All sequences in one row; what fills it up to `multiple` is a sequence of its own."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [len(s.ids) for _, s in samples]
    if rest := -sum(lengths) % multiple:
        lengths.append(rest)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    grid = _Grid(1, int(starts[-1]))
    for start, (i, s) in zip(starts[:-1], samples, strict=False):
        grid.put(0, int(start), i, s)
    cumulative = torch.from_numpy(starts).to(device, torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return grid.finish(None, packed, device)


class _Grid:
    """The input tensor being filled, `[B, S]`."""

    def __init__(self, batch: int, length: int) -> None:
        self.length = length
        self.ids = np.zeros((batch, length), dtype=np.int64)
        self.position = np.zeros((batch, length), dtype=np.int64)
        self.owner = np.full((batch, length), -1, dtype=np.int64)
        self.target = np.full((batch, length), -1, dtype=np.int64)

    def put(self, row: int, column: int, sample: int, s: Sample) -> None:
        here = slice(column, column + len(s.ids))
        self.ids[row, here] = s.ids
        self.position[row, here] = np.arange(len(s.ids))
        self.owner[row, here] = sample
        wanted = s.sampled_positions
        self.target[row, column + wanted.start : column + wanted.stop] = s.response_ids

    def finish(self, mask: torch.Tensor | None, packed: Any, device: torch.device) -> ModelInput:
        row, column = np.nonzero(self.owner >= 0)
        target = self.target[row, column]
        sampled = np.flatnonzero(target >= 0)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return ModelInput(
            ids=tensor(self.ids),
            positions=tensor(self.position),
            mask=mask,
            packed=packed,
            rows=tensor(column * len(self.ids) + row),
            sample=self.owner[row, column],
            position=self.position[row, column],
            sampled=tensor(sampled),
            targets=tensor(target[sampled]),
        )
