"""Where each sequence begins for the attention, measured on the first layer that has one.

The first token of a sequence attends only to itself, so its attention output is its own value
vector, with each key-value head repeated for its group. Any later token attends to more tokens. A
row that breaks this rule is in the wrong sequence, however the engine packs, pads or masks. A token
that repeats the previous one averages equal values, which does not show how many tokens it sees.

Beside sinks the first token's output is a multiple of its value in each head. The multiple is
unknown, so a later token that attends only to itself is not found there.
"""

import numpy as np
import torch

from rlk_align.trace.cached import cached_values
from rlk_align.trace.schema import WRONG_ROWS, Attended, BoundaryRecord, CacheRecord, WrongBoundary

ALIKE = 2.0**-5
"""The relative distance up to which an output equals the value; one rounding in bf16 is 2^-8."""


def alike(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Which rows of attention `[N, F]` equal the value of a single token, `[N]`."""
    a, b = out.double(), value.double()
    return ~((a - b).norm(dim=1) / b.norm(dim=1) > ALIKE)


class BoundaryCheck:
    """Checks the first attention of one pass."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        sinks: bool = False,
        value: str = "layers.0.v_proj",
        output: str = "layers.0.attn",
        *,
        cache: CacheRecord | None = None,
    ) -> None:
        """`value`: the site of the values that the attention `output` reads; `cache`: the quantised
        cache that holds them, if there is one."""
        self._of_value, self._of_output = value, output
        self._heads, self._kv_heads, self._sinks = heads, kv_heads, sinks
        self._cache, self._layer = cache, int(output.split(".")[1])
        self._value: torch.Tensor | None = None
        self._last: dict[int, tuple[int, torch.Tensor]] = {}
        """Per sample, the position and value of the last row, since decode has one at a time."""
        self._checked = 0
        self._wrong = 0
        self._first: list[WrongBoundary] = []

    def see(self, site: str, rows: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> None:
        """Takes the rows of each site; only that layer's values and attention are used."""
        if site == self._of_value:
            self._value = cached_values(self._cache, self._layer, rows.detach()).clone()
        elif site == self._of_output and self._value is not None:
            value, self._value = self._value, None
            self._check(value, rows.detach(), sample, position)

    def record(self) -> BoundaryRecord:
        return BoundaryRecord.of(self._checked, self._wrong, self._first)

    def _check(
        self, value: torch.Tensor, out: torch.Tensor, sample: np.ndarray, position: np.ndarray
    ) -> None:
        group = self._heads // self._kv_heads
        repeated = value.reshape(len(value), self._kv_heads, 1, -1).expand(-1, -1, group, -1)
        repeated = repeated.reshape(len(value), -1)
        if repeated.shape != out.shape:
            return
        self._checked += len(out)
        first = position == 0
        # An average with different values cannot equal the token's own value bit for bit.
        alone = (repeated == out).all(dim=1).cpu().numpy() & self._changed(value, sample, position)
        among = np.zeros(len(out), dtype=bool)
        if first.any():
            at = torch.from_numpy(np.flatnonzero(first)).to(out.device)
            own = self._scaled(repeated[at], out[at]) if self._sinks else repeated[at]
            among[first] = (~alike(out[at], own)).cpu().numpy()
        suspects: tuple[tuple[np.ndarray, Attended], ...]
        suspects = ((among, "other tokens"), (alone, "itself alone"))
        for wrong, sees in suspects:
            self._wrong += int(wrong.sum())
            for row in np.flatnonzero(wrong)[:WRONG_ROWS].tolist():
                self._first.append(
                    WrongBoundary(sample=int(sample[row]), position=int(position[row]), sees=sees)
                )

    def _scaled(self, value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The value of each row, times the share of each head that is closest to its output."""
        v, o = (x.double().reshape(len(x), self._heads, -1) for x in (value, out))
        share = (v * o).sum(dim=-1, keepdim=True) / v.square().sum(dim=-1, keepdim=True)
        return (v * share.clamp(0, 1)).flatten(1)

    def _changed(self, value: torch.Tensor, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Bool `[N]`: rows whose value is known to differ from that of the previous position."""
        order = np.lexsort((position, sample))
        before, after = order[:-1], order[1:]
        follows = (sample[before] == sample[after]) & (position[before] + 1 == position[after])
        before, after = before[follows], after[follows]
        changed = np.zeros(len(value), dtype=bool)
        changed[after] = (value[before] != value[after]).any(dim=1).cpu().numpy()
        _, starts = np.unique(sample[order], return_index=True)
        for row in order[starts].tolist():
            last, previous = self._last.get(int(sample[row]), (None, None))
            if previous is not None and last == position[row] - 1:
                changed[row] = bool((previous != value[row]).any())
        for row in order[np.append(starts[1:], len(order)) - 1].tolist():
            self._last[int(sample[row])] = (int(position[row]), value[row].clone())
        return changed
