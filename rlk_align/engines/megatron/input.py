"""The input of one forward, padded or packed, and the part of it that a rank has.

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
    """The arguments of GPTModel, and the rows of its output."""

    ids: torch.Tensor
    """int64 `[B, S]`; padding is id 0."""
    positions: torch.Tensor
    """int64 `[B, S]`; 0 at padding."""
    mask: torch.Tensor | None
    """bool `[B or 1, 1, S, S]`, True if a query must not see a key; None for packed sequences and
    for slices of sequences."""
    packed: Any
    """PackedSeqParams; None for padded sequences."""
    rows: ForwardRows
    """The rows of a `[S, B]` output."""
    index: torch.Tensor
    """int64 `[N]`: `rows.index` on the device."""
    sampled: torch.Tensor
    """int64: the elements of `index` whose next token was sampled."""
    targets: torch.Tensor
    """int64: the next token of each of those."""
    slices: Slices
    """The slices of the whole input that this rank has."""
    number: np.ndarray
    """int64: the number of each target among the sampled tokens of the whole input."""
    total: int
    """The number of sampled tokens of the whole input."""


def padded_input(
    samples: Sequence[tuple[int, Sample]], side: str, multiple: int, dp: Ranks, cp: Ranks
) -> ModelInput:
    """One sequence in each row, padded on `side` to the longest, rounded up to `multiple`: this
    rank's sequences by `dp`, and its slices of each by `cp`."""
    grid = padded_grid(samples, side, multiple).deal(dp.rank, dp.world)
    length, device = grid.ids.shape[1], cp.device
    slices = Slices((0, length), cp)
    if cp.world > 1:
        return _input(grid, None, None, slices)
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None]
    if side == "left":
        # Causal attention never sees padding on the right. A row that consists of padding must see
        # itself.
        padding = ~grid.real & grid.real.any(axis=1, keepdims=True)
        hidden = hidden | torch.from_numpy(padding).to(device)[:, None, :]
    return _input(grid, hidden[:, None], None, slices)


def packed_input(
    samples: Sequence[tuple[int, Sample]], multiple: int, dp: Ranks, cp: Ranks
) -> ModelInput:
    """All sequences of this rank in one row. Padding to `multiple`, and to the length of other
    ranks' rows, forms a further sequence. `dp`: the ranks that divide the sequences; `cp`: the
    ranks that share each sequence and the padding after it."""
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
    # Both grids have the same order: by row, then by column.
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
        # The order of `sampled`: by row of the grid, then by position.
        targets=tensor(grid.targets[grid.targets >= 0]),
        slices=slices,
        number=number[grid.targets >= 0],
        total=int(sampled.sum()),
    )
