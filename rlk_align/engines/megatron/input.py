"""One forward's input, padded or packed, whole or this rank's slices of it.

B = sequences of the input tensor, S = its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.rows import ForwardRows, TokenGrid, packed_grid, padded_grid
from rlk_align.engines.megatron.slices import Slices
from rlk_align.engines.process.ranks import Ranks
from rlk_align.model.prompts import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """What GPTModel takes, and which rows its output has."""

    ids: torch.Tensor
    """int64 `[B, S]`; padding is id 0."""
    positions: torch.Tensor
    """int64 `[B, S]`; 0 at padding."""
    mask: torch.Tensor | None
    """bool `[B or 1, 1, S, S]`, True where query may not see key; None where packed, and where
    ranks have slices of sequences."""
    packed: Any
    """PackedSeqParams, or None where padded."""
    rows: ForwardRows
    """Of a `[S, B]` output."""
    index: torch.Tensor
    """int64 `[N]`: `rows.index` on the device."""
    sampled: torch.Tensor
    """int64: those of `index` whose next token was sampled."""
    targets: torch.Tensor
    """int64: that token."""
    slices: Slices
    """Which rows of the whole input these are."""
    number: np.ndarray
    """int64: which of the tokens that were sampled in the whole input each target is."""
    total: int
    """How many those are."""


def padded_input(
    samples: Sequence[tuple[int, Sample]], side: str, multiple: int, ranks: Ranks
) -> ModelInput:
    """One sequence a row, padded on `side` to the longest, rounded up to `multiple`; of several
    `ranks`, what this one has of it."""
    grid, device = padded_grid(samples, side, multiple), ranks.device
    length = grid.ids.shape[1]
    slices = Slices((0, length), ranks)
    if ranks.world > 1:
        return _input(grid, None, None, slices)
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None]
    if side == "left":
        # On the right padding is never seen: it comes after every query that counts.
        hidden = hidden | torch.from_numpy(~grid.real).to(device)[:, None, :]
    return _input(grid, hidden[:, None], None, slices)


def packed_input(samples: Sequence[tuple[int, Sample]], multiple: int, ranks: Ranks) -> ModelInput:
    """All sequences in one row; what fills it up to `multiple` is a sequence of its own. Of several
    `ranks`, what this one has of it: each sequence has padding behind it, so that they can share
    it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    grid = packed_grid(samples, multiple, 1 if ranks.world == 1 else 2 * ranks.world)
    ends = np.array([*(column for _, column in grid.starts), grid.ids.size])
    filled = sum(len(s.ids) for _, s in samples)
    if ranks.world == 1 and filled < grid.ids.size:
        ends = np.insert(ends, -1, filled)
    cumulative = torch.from_numpy(ends).to(ranks.device, torch.int32)
    longest = int(np.diff(ends).max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return _input(grid, None, packed, Slices(tuple(ends.tolist()), ranks))


def _input(whole: TokenGrid, mask: torch.Tensor | None, packed: Any, slices: Slices) -> ModelInput:
    columns, device = slices.columns(), slices.ranks.device
    grid = whole.select(columns)
    rows = grid.rows("sequence first")
    # The same order in both grids: by row, then by column.
    sampled = whole.targets >= 0
    number = np.where(sampled, np.cumsum(sampled).reshape(sampled.shape) - 1, -1)[:, columns]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ModelInput(
        ids=tensor(grid.ids),
        positions=tensor(grid.positions),
        mask=mask,
        packed=packed,
        rows=rows,
        index=tensor(rows.index),
        sampled=tensor(rows.index[rows.sampled]),
        # The same order: by row of the grid, then by position.
        targets=tensor(grid.targets[grid.targets >= 0]),
        slices=slices,
        number=number[grid.targets >= 0],
        total=int(sampled.sum()),
    )
