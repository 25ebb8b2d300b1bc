"""Which position each row was rotated by, measured from what went into the rotary embedding of
layer 0 and what came out: of the queries; and whether the keys of a sequence are shifted as they
are.

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
        self._inputs: dict[str, torch.Tensor] = {}
        self._checked = self._keys = 0
        self._shifts: dict[int, int] = {}
        """Sample -> by how much the position of its first row is shifted."""
        self._constant = True
        """Whether that of all its rows is."""
        self._wrong = 0
        self._first: list[WrongPosition] = []

    def see(self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> None:
        """Takes part in every tap; only the way of queries and keys through layer 0 matters."""
        rotary = self._rotary
        if site in (rotary.source, rotary.key_source):
            self._inputs[site] = rows.detach().clone()
        elif site == "layers.0.q_rope" and rotary.source in self._inputs:
            x = self._inputs.pop(rotary.source)
            self._check(self._turned(x, rows.detach(), rotary.heads), sample, position)
        elif site == "layers.0.k_rope" and rotary.key_source in self._inputs:
            x = self._inputs.pop(rotary.key_source)
            turned = self._turned(x, rows.detach(), rotary.kv_heads)
            self._keys += len(turned)
            self._follow(turned, self._off(turned, position), sample, position)

    def record(self) -> PositionRecord:
        found = PositionRecord.of(self._checked, self._wrong, self._first)
        if not (self._constant and self._shifts and self._keys == self._checked):
            return found
        shift = (min(self._shifts.values()), max(self._shifts.values()))
        return found.model_copy(update={"shift": shift})

    def _turned(self, x: torch.Tensor, y: torch.Tensor, heads: int) -> torch.Tensor:
        """The angle of each pair, summed over heads: `[N, F]` twice -> radians `[N, pairs]`; NaN of
        a pair that is 0, as in the query of a padding token, whose embedding is 0."""
        if x.shape != y.shape:
            return torch.zeros(0, len(self._frequency), dtype=torch.float64)
        pairs = len(self._frequency)
        a, b = (t.reshape(len(t), heads, -1)[..., : 2 * pairs].float() for t in (x, y))
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
        off = self._off(turned, position)
        self._follow(turned, off, sample, position)
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

    def _off(self, turned: torch.Tensor, position: np.ndarray) -> torch.Tensor:
        """How far each angle is from that of a position."""
        expected = torch.from_numpy(position).double()[:, None] * self._frequency
        return torch.remainder(turned - expected + np.pi, 2 * np.pi) - np.pi

    def _follow(
        self, turned: torch.Tensor, off: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        """Whether the rows of each sequence are shifted as its first one is; `off`: how far they
        are from their own positions."""
        for number in np.unique(sample).tolist() if self._constant and len(turned) else ():
            rows = np.flatnonzero((sample == number) & turned.isfinite().all(dim=1).numpy())
            if not len(rows):
                continue
            if number not in self._shifts:
                own = not bool((off[rows[0]].abs() > RESOLUTION).any())
                effective = int(position[rows[0]]) if own else self._effective(turned[rows[0]])
                if effective is None:
                    self._constant = False
                    return
                self._shifts[number] = effective - int(position[rows[0]])
            shift = self._shifts[number]
            apart = self._off(turned[rows], position[rows] + shift) if shift else off[rows]
            self._constant &= not bool((apart.abs() > RESOLUTION).any())

    def _effective(self, turned: torch.Tensor) -> int | None:
        """The position whose rotation it is; None where it is that of none."""
        # One before 0 too: positions that are off by one the other way.
        candidates = torch.arange(-1, self._rotary.context, dtype=torch.float64)
        match = torch.cos(turned - candidates[:, None] * self._frequency).nanmean(dim=1)
        best = int(match.argmax())
        return best - 1 if match[best] >= MATCH else None
