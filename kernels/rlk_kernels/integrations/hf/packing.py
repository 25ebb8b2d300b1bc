"""Padded rows, rewritten as one row without their padding.

Without padding, no layer has to move the real tokens together, and no operator computes padding.
The new row has a multiple of `MULTIPLE` tokens, so that steps with other lengths have the same
shapes: the kernels' plans and launches are cached by shape.

B = padded rows   L = their tokens   N = tokens of the new row   M = scored tokens
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlk_kernels.integrations.hf.loss import NO_TOKEN

MULTIPLE = {"cuda": 512, "cpu": 8}
"""Device -> the number of tokens of which a row has a multiple."""


@dataclass(frozen=True)
class PackedRow:
    """One row, in which each padded row is a sequence. A last sequence fills it up."""

    ids: Tensor
    """int64 [1, N]."""
    positions: Tensor
    """int64 [1, N]: they begin with 0 in each sequence."""
    starts: Tensor
    """int32 [B + 2]: where each sequence begins, and where the last one ends."""
    rows: Tensor
    """int64 [M]: the tokens of the new row whose next token is scored; others fill them up to a
    multiple."""
    targets: Tensor
    """int64 [1, M]: the next tokens; NO_TOKEN for those that fill up."""
    places: Tensor
    """int64 [scored tokens]: the place of each in the result [B * last]."""
    shape: tuple[int, int]
    """(B, last)."""

    def unpacked(self, scores: Tensor) -> Tensor:
        """[B, last, F] of scores[1, M, F]; 0 at padding."""
        batch, last = self.shape
        values = scores[0, : len(self.places)]
        flat = values.new_zeros(batch * last, values.shape[1])
        return flat.index_copy(0, self.places, values).unflatten(0, (batch, last))


def packed(ids: Tensor, mask: Tensor, last: int) -> PackedRow:
    """The real tokens of ids[B, L], by mask[B, L], as one row. The `last` tokens of each row are
    scored. A token is real where the mask is not 0; it is scored if its predecessor is real, too.

    Waits for a GPU once, because the mask decides the sizes.
    """
    multiple = MULTIPLE[ids.device.type]
    real = mask.bool().cpu()
    batch, length = real.shape
    index = real.flatten().cumsum(0) - 1
    kept = real.flatten().nonzero().squeeze(1)
    padding = _up_to(len(kept), multiple) - len(kept)
    positions = torch.cat([(real.cumsum(1) - 1)[real], torch.arange(padding)])
    starts = pad(real.sum(1).cumsum(0), (1, 0))
    starts = torch.cat([starts, starts.new_tensor([len(kept) + padding])])
    first = length - 1 - last
    scored = real[:, first:-1] & real[:, first + 1 :]
    places = scored.flatten().nonzero().squeeze(1)
    before = places // max(last, 1) * length + first + places % max(last, 1)
    rows = index[before]
    others = torch.ones(len(positions), dtype=torch.bool).index_fill(0, rows, False)
    filling = others.nonzero().squeeze(1)[: _up_to(len(rows), multiple) - len(rows)]
    parts = kept, positions, starts, torch.cat([rows, filling]), before + 1, places
    # One copy to the device.
    moved = torch.cat(parts).to(ids.device).split([len(part) for part in parts])
    kept, positions, starts, rows, after, places = moved
    flat = ids.flatten().long()
    return PackedRow(
        ids=pad(flat[kept], (0, padding))[None],
        positions=positions[None],
        starts=starts.to(torch.int32),
        rows=rows,
        targets=pad(flat[after], (0, len(filling)), value=NO_TOKEN)[None],
        places=places,
        shape=(batch, last),
    )


def _up_to(count: int, multiple: int) -> int:
    """The first multiple that is above 0 and at least `count`."""
    return max(-(-count // multiple), 1) * multiple
