"""Which position each row was rotated by, measured from what went into the rotary embedding of
layer 0 and what came out.

A rotary embedding turns the pair (x_j, x_{j+d/2}) of every head by the angle p * w_j (Su et al.
2021, in the half-split layout of the checkpoints), so the angle between input and output gives
the position back: whatever an engine claims, packs or pads, this is what it did.
"""

import numpy as np
import torch

from rlk_align.model.rotary import Rotary
from rlk_align.trace.schema import WRONG_ROWS, PositionRecord, WrongPosition

RESOLUTION = 0.25
"""Radians: bf16 tables and values are off by 0.02, a neighbouring position by w_0 = 1."""
MATCH = 0.995
"""Mean cosine from which on a rotation is that of a position at all."""


class PositionCheck:
    """Follows layer 0 of one pass."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._frequency = torch.tensor(rotary.inv_freq, dtype=torch.float64)
        self._input: torch.Tensor | None = None
        self._checked = 0
        self._wrong = 0
        self._first: list[WrongPosition] = []

    def see(self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> None:
        """Takes part in every tap; only the query's way through layer 0 matters."""
        if site == self._rotary.source:
            self._input = rows.detach().clone()
        elif site == "layers.0.q_rope" and self._input is not None:
            turned, self._input = self._turned(self._input, rows.detach()), None
            self._check(turned, sample, position)

    def record(self) -> PositionRecord:
        return PositionRecord.of(self._checked, self._wrong, self._first)

    def _turned(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The angle of each pair, summed over heads: `[N, F]` twice -> radians `[N, pairs]`; NaN of
        a pair that is 0, as in the query of a padding token, whose embedding is 0."""
        if x.shape != y.shape:
            return torch.zeros(0, len(self._frequency), dtype=torch.float64)
        pairs = len(self._frequency)
        a, b = (t.reshape(len(t), self._rotary.heads, -1)[..., : 2 * pairs].float() for t in (x, y))
        real = a * b
        cross = a[..., :pairs] * b[..., pairs:] - a[..., pairs:] * b[..., :pairs]
        dot = real[..., :pairs] + real[..., pairs:]
        across, along = cross.sum(1), dot.sum(1)
        angle = torch.atan2(across, along).where((across != 0) | (along != 0), torch.nan)
        return angle.double().cpu()

    def _check(self, turned: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> None:
        if not len(turned):
            return
        self._checked += len(turned)
        expected = torch.from_numpy(position).double()[:, None] * self._frequency
        off = torch.remainder(turned - expected + np.pi, 2 * np.pi) - np.pi
        # Where a value is not finite, or 0, there is no angle.
        for row in torch.nonzero((off.abs() > RESOLUTION).any(dim=1)).flatten().tolist():
            if len(self._first) >= 4 * WRONG_ROWS:
                self._wrong += 1
                continue
            effective = self._effective(turned[row])
            if effective is not None and effective != position[row]:
                self._wrong += 1
                self._first.append(
                    WrongPosition(
                        sample=int(sample[row]), position=int(position[row]), effective=effective
                    )
                )

    def _effective(self, turned: torch.Tensor) -> int | None:
        """The position whose rotation it is; None where it is that of none."""
        # One before 0 too: positions that are off by one the other way.
        candidates = torch.arange(-1, self._rotary.context, dtype=torch.float64)
        match = torch.cos(turned - candidates[:, None] * self._frequency).nanmean(dim=1)
        best = int(match.argmax())
        return best - 1 if match[best] >= MATCH else None
