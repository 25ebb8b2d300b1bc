"""One forward's input, padded or packed.

B = sequences of the input tensor, S = its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.rows import ForwardRows, TokenGrid, packed_grid, padded_grid
from rlk_align.model.prompts import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInput:
    """What GPTModel takes, and which rows its output has."""

    ids: torch.Tensor
    """int64 `[B, S]`; padding is id 0."""
    positions: torch.Tensor
    """int64 `[B, S]`; 0 at padding."""
    mask: torch.Tensor | None
    """bool `[B or 1, 1, S, S]`, True where query may not see key; None where packed."""
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


def padded_input(
    samples: Sequence[tuple[int, Sample]], side: str, multiple: int, device: torch.device
) -> ModelInput:
    """One sequence a row, padded on `side` to the longest, rounded up to `multiple`."""
    grid = padded_grid(samples, side, multiple)
    length = grid.ids.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None]
    if side == "left":
        # On the right padding is never seen: it comes after every query that counts.
        hidden = hidden | torch.from_numpy(~grid.real).to(device)[:, None, :]
    return _input(grid, hidden[:, None], None, device)


def packed_input(
    samples: Sequence[tuple[int, Sample]], multiple: int, device: torch.device
) -> ModelInput:
    """All sequences in one row; what fills it up to `multiple` is a sequence of its own."""
    from megatron.core.packed_seq_params import PackedSeqParams

    grid = packed_grid(samples, multiple)
    ends = np.cumsum([0, *(len(s.ids) for _, s in samples)])
    if ends[-1] < grid.ids.size:
        ends = np.append(ends, grid.ids.size)
    cumulative = torch.from_numpy(ends).to(device, torch.int32)
    longest = int(np.diff(ends).max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return _input(grid, None, packed, device)


def _input(
    grid: TokenGrid, mask: torch.Tensor | None, packed: Any, device: torch.device
) -> ModelInput:
    rows = grid.rows("sequence first")

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
    )
