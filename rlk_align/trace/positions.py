"""The position by which each query of the first attention was rotated, measured from the input and
the output of the rotary embedding; and whether the keys of a sequence are shifted like its queries.

A rotary embedding turns the pair (x_j, x_{j+d/2}) of every head by the angle p * w_j (Su et al.
2021, in the half-split layout of most checkpoints; in others (x_2j, x_{2j+1})). The angle between
input and output is therefore the position that the engine used, however it packs or pads.
"""

import numpy as np
import torch

from rlk_align.model.rotary import Rotary, last_features
from rlk_align.trace.schema import WRONG_ROWS, PositionRecord, WrongPosition

RESOLUTION = 0.25
"""Radians: bf16 tables and values differ by 0.02, neighbouring positions by w_0 = 1."""
MATCH = 0.995
"""The smallest mean cosine of a rotation that belongs to a position."""


class PositionCheck:
    """Checks the first attention of one pass."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._query, self._key = (f"layers.{rotary.layer}.{op}" for op in ("q_rope", "k_rope"))
        self._frequency = torch.tensor(rotary.inv_freq, dtype=torch.float64)
        self._inputs: dict[str, torch.Tensor] = {}
        self._checked = self._keys = 0
        self._shifts: dict[int, int] = {}
        """Sample -> the shift of the position of its first row."""
        self._constant = True
        """Whether all rows of each sample have that shift."""
        self._wrong = 0
        self._first: list[WrongPosition] = []

    def see(self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> None:
        """Takes the rows of each site; only that layer's queries and keys are used."""
        rotary = self._rotary
        if site in (rotary.source, rotary.key_source):
            self._inputs[site] = rows.detach().clone()
        elif site == self._query and rotary.source in self._inputs:
            x = self._inputs.pop(rotary.source)
            self._check(self._turned(x, rows.detach(), rotary.heads), sample, position)
        elif site == self._key and rotary.key_source in self._inputs:
            x = self._inputs.pop(rotary.key_source)
            turned = self._turned(x, rows.detach(), rotary.kv_heads)
            self._keys += len(turned)
            self._follow(turned, self._off(turned, position), sample, position)

    def record(self) -> PositionRecord:
        record = PositionRecord.of(self._checked, self._wrong, self._first)
        if not (self._constant and self._shifts and self._keys == self._checked):
            return record
        shift = (min(self._shifts.values()), max(self._shifts.values()))
        return record.model_copy(update={"shift": shift})

    def _turned(self, x: torch.Tensor, y: torch.Tensor, heads: int) -> torch.Tensor:
        """The angle of each pair, summed over heads: two `[N, F]` -> radians `[N, pairs]`. It is
        NaN for a pair that is 0, as in the query of a padding token, whose embedding is 0."""
        if x.shape[1] > y.shape[1]:
            x = last_features(x, heads, y.shape[1])
        if x.shape != y.shape:
            return torch.zeros(0, len(self._frequency), dtype=torch.float64)
        pairs = len(self._frequency)
        a, b = (t.reshape(len(t), heads, -1)[..., : 2 * pairs].float() for t in (x, y))
        if self._rotary.interleaved:
            a, b = (t.unflatten(-1, (pairs, 2)).transpose(-1, -2).flatten(-2) for t in (a, b))
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
        # A pair that is 0 or not finite has no angle.
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
        """The difference of each angle from the angle of its position."""
        expected = torch.from_numpy(position).double()[:, None] * self._frequency
        return torch.remainder(turned - expected + np.pi, 2 * np.pi) - np.pi

    def _follow(
        self, turned: torch.Tensor, off: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        """Records whether all rows of each sequence have the shift of its first row; `off`: the
        differences from their own positions."""
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
            shifted = self._off(turned[rows], position[rows] + shift) if shift else off[rows]
            self._constant &= not bool((shifted.abs() > RESOLUTION).any())

    def _effective(self, turned: torch.Tensor) -> int | None:
        """The position that these angles belong to; None if they belong to none."""
        # Starts at -1, which is position 0 shifted by one.
        candidates = torch.arange(-1, self._rotary.context, dtype=torch.float64)
        match = torch.cos(turned - candidates[:, None] * self._frequency).nanmean(dim=1)
        best = int(match.argmax())
        return best - 1 if match[best] >= MATCH else None
