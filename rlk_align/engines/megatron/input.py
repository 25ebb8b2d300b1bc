"""One forward's input, padded or packed, and the part that a rank has.

B = sequences of the input tensor, S = its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.rows import (
    ForwardRows,
    TokenGrid,
    filled_length,
    packed_grid,
    padded_grid,
)
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
    """The rows of a `[S, B]` output."""
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
    samples: Sequence[tuple[int, Sample]], side: str, multiple: int, dp: Ranks, cp: Ranks
) -> ModelInput:
    """One sequence a row, padded on `side` to the longest, rounded up to `multiple`; what this rank
    has of it: of the sequences by `dp`, and of each of them by `cp`."""
    grid = padded_grid(samples, side, multiple).deal(dp.rank, dp.world)
    length, device = grid.ids.shape[1], cp.device
    slices = Slices((0, length), cp)
    if cp.world > 1:
        return _input(grid, None, None, slices)
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None]
    if side == "left":
        # On the right padding is never seen: it comes after every query that counts. A row of
        # nothing else sees itself.
        padding = ~grid.real & grid.real.any(axis=1, keepdims=True)
        hidden = hidden | torch.from_numpy(padding).to(device)[:, None, :]
    return _input(grid, hidden[:, None], None, slices)


def packed_input(
    samples: Sequence[tuple[int, Sample]], multiple: int, dp: Ranks, cp: Ranks
) -> ModelInput:
    """All sequences of this rank in one row; what fills it up to `multiple`, and to what other
    ranks have, is a sequence of its own. `dp`: among which sequences are dealt; `cp`: among which
    each is shared, padding behind it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    each = 1 if cp.world == 1 else 2 * cp.world
    lengths = [filled_length(s, each) for _, s in samples]
    longest = max(sum(lengths[rank :: dp.world]) for rank in range(dp.world))
    grid = packed_grid(samples[dp.rank :: dp.world], multiple, each, longest)
    ends = np.cumsum([0, *lengths[dp.rank :: dp.world]])
    if ends[-1] < grid.ids.size:
        ends = np.append(ends, grid.ids.size)
    cumulative = torch.from_numpy(ends).to(cp.device, torch.int32)
    longest = int(np.diff(ends).max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return _input(grid, None, packed, Slices(tuple(ends.tolist()), cp))


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
