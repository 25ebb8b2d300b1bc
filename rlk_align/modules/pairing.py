"""Which tensor of a checkpoint each parameter of a live engine holds, by the values of their rows.

An engine may fuse tensors, stack them, transpose them, pad them, and rename them. Names decide only
between equal tensors, and tell which tensor a parameter is whose values are in none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rlk_align.modules.names import likeness
from rlk_align.modules.stored import StoredWeights
from rlk_align.trace.digest import digest_slices

_MOST_TRIED = 32
"""The number of equal rows that are tried as the beginning of a run."""
_RECOGNISED = 0.5
"""The share of a parameter's rows that must be in the checkpoint for the others to count as changed
rows of the same tensors."""


@dataclass(frozen=True, slots=True)
class ParameterRows:
    """A parameter of a live engine, by its rows."""

    name: str
    dtype: str
    width: int
    """The number of entries of a row; 1 for a vector, whose entries are its rows."""
    rows: np.ndarray
    """int64 `[R]`: a digest of each row."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor of the checkpoint in a live parameter."""

    live: str
    tensor: str
    transposed: bool
    offsets: np.ndarray
    """int64 `[R]`: the row of the parameter that holds each row of the tensor, or of its transpose;
    -1 for a row that it lacks."""
    changed: int
    """The number of these rows with other values."""

    @property
    def whole(self) -> bool:
        return bool(len(self.offsets)) and bool((self.offsets >= 0).all())


@dataclass
class Pairing:
    """The parameters of one side, and the tensors that they hold."""

    by_tensor: dict[str, list[Holding]] = field(default_factory=dict)
    by_parameter: dict[str, list[Holding]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    """Live parameters that hold no tensor."""

    @property
    def holdings(self) -> list[Holding]:
        return [h for held in self.by_parameter.values() for h in held]

    @property
    def found(self) -> set[str]:
        """The tensors that a parameter holds as a whole, with the same or with changed rows."""
        return {h.tensor for h in self.holdings if h.whole}

    @property
    def changed(self) -> list[Holding]:
        return [h for h in self.holdings if h.changed]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows of a parameter that are rows of one tensor, `step` apart."""

    tensor: str
    transposed: bool
    offset: int
    first: int
    count: int
    step: int


def pair(stored: StoredWeights, live: Mapping[str, ParameterRows]) -> Pairing:
    """Pairs the parameters of one side. Raises ModelError for a checkpoint that cannot be read."""
    finder, pairing = _Finder(stored), Pairing()
    matrices = [p for p in live.values() if p.width > 1]
    for parameter in matrices:
        _add(pairing, parameter, finder.matrix(parameter))
    for parameter in live.values():
        if parameter.width == 1:
            weight = f"{parameter.name.rpartition('.')[0]}.weight"
            beside = pairing.by_parameter.get(weight, [])
            _add(pairing, parameter, finder.vector(parameter, beside))
    return pairing


def _add(pairing: Pairing, parameter: ParameterRows, holdings: list[Holding]) -> None:
    pairing.by_parameter[parameter.name] = holdings
    for holding in holdings:
        pairing.by_tensor.setdefault(holding.tensor, []).append(holding)
    if not holdings:
        pairing.strays.append(parameter.name)


class _Finder:
    """Finds rows in a checkpoint."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored
        self._indices: dict[tuple[str, int, bool], _RowIndex] = {}

    def matrix(self, p: ParameterRows) -> list[Holding]:
        named = self._named(p)
        if named is not None and not named.changed:
            return [named]
        for transposed in (False, True):
            runs = self._runs(p, transposed)
            held = self._holdings(p, runs)
            if held and not sum(h.changed for h in held) and _covers(p, held):
                return held
            matched = sum(run.count for run in runs)
            if held and named is None and matched >= _RECOGNISED * len(p.rows):
                return held
        return [named] if named is not None else []

    def vector(self, p: ParameterRows, beside: list[Holding]) -> list[Holding]:
        """`beside`: what the weight of the same module holds."""
        named = self._named(p)
        if named is not None and not named.changed:
            return [named]
        fused = self._fused(p, beside)
        if fused and not sum(h.changed for h in fused):
            return fused
        pieces = self._pieces(p)
        if pieces:
            return pieces
        return [named] if named is not None else fused

    def _named(self, p: ParameterRows) -> Holding | None:
        """The tensor of the same name, if it has the same form but for padding after it."""
        for name in self._stored.names.same(p.name):
            if self._stored.width(name) != p.width:
                continue
            rows = self._stored.rows(name, p.dtype)
            n = len(rows)
            if n and n <= len(p.rows) and (p.rows[n:] == _zero(p.width)).all():
                changed = int((p.rows[:n] != rows).sum())
                return Holding(p.name, name, False, np.arange(n), changed)
        return None

    def _fused(self, p: ParameterRows, beside: list[Holding]) -> list[Holding]:
        """The biases of the tensors that are fused in the module's weight, in the same order."""
        suffix, out = p.name.rpartition(".")[2], []
        for h in beside:
            name = f"{h.tensor.rpartition('.')[0]}.{suffix}"
            if name not in self._stored.tensors or self._stored.width(name) != 1:
                return []
            rows = self._stored.rows(name, p.dtype)
            if len(rows) != len(h.offsets) or not h.whole or h.offsets.max() >= len(p.rows):
                return []
            changed = int((p.rows[h.offsets] != rows).sum())
            out.append(Holding(p.name, name, False, h.offsets, changed))
        return out if sum(len(h.offsets) for h in out) == len(p.rows) else []

    def _pieces(self, p: ParameterRows) -> list[Holding]:
        """Whole vectors of the checkpoint, one after another."""
        vectors = [n for n in self._stored.tensors if self._stored.width(n) == 1]
        at, out = 0, []
        while at < len(p.rows):
            equal = []
            for name in vectors:
                rows = self._stored.rows(name, p.dtype)
                if len(rows) and np.array_equal(p.rows[at : at + len(rows)], rows):
                    equal.append((name, len(rows)))
            if not equal:
                return []
            longest = max(size for _, size in equal)
            same = [name for name, size in equal if size == longest]
            name = max(same, key=lambda n: likeness(p.name, n))
            out.append(Holding(p.name, name, False, np.arange(at, at + longest), 0))
            at += longest
        return out

    def _runs(self, p: ParameterRows, transposed: bool) -> list[_Run]:
        index, at, runs = self._index(p.dtype, p.width, transposed), 0, []
        while at < len(p.rows):
            best = max(
                index.runs(p.rows, at),
                key=lambda run: (run.count, likeness(p.name, run.tensor)),
                default=None,
            )
            if best is not None:
                runs.append(best)
            at += best.count if best else 1
        return runs

    def _index(self, dtype: str, width: int, transposed: bool) -> "_RowIndex":
        key = (dtype, width, transposed)
        if key not in self._indices:
            names = [n for n in self._stored.tensors if self._stored.width(n, transposed) == width]
            rows = {n: self._stored.rows(n, dtype, transposed) for n in names}
            self._indices[key] = _RowIndex(rows, transposed)
        return self._indices[key]

    def _holdings(self, p: ParameterRows, runs: list[_Run]) -> list[Holding]:
        """The tensors of these runs. Rows between two runs of one tensor, and before or after its
        runs, are its changed rows where as many are missing from it."""
        out = []
        for name in dict.fromkeys(run.tensor for run in runs):
            mine = [run for run in runs if run.tensor == name]
            rows = self._stored.rows(name, p.dtype, mine[0].transposed)
            offsets = np.full(len(rows), -1)
            for run in mine:
                at = run.first + run.step * np.arange(run.count)
                offsets[at] = run.offset + np.arange(run.count)
            changed = _fill(offsets, _unclaimed(p, runs))
            out.append(Holding(p.name, name, mine[0].transposed, offsets, changed))
        return out


def _unclaimed(p: ParameterRows, runs: list[_Run]) -> np.ndarray:
    """A mask of the parameter's rows that no run has, without padding."""
    mask = p.rows != _zero(p.width)
    for run in runs:
        mask[run.offset : run.offset + run.count] = False
    return mask


def _fill(offsets: np.ndarray, free: np.ndarray) -> int:
    """Gives each missing row of a tensor the parameter's row beside that of its neighbour, if this
    one is free. Returns how many rows were given."""
    filled = 0
    for order, step in ((range(1, len(offsets)), 1), (range(len(offsets) - 2, -1, -1), -1)):
        for i in order:
            beside = offsets[i - step]
            at = beside + step
            if offsets[i] < 0 <= beside and 0 <= at < len(free) and free[at]:
                offsets[i], free[at] = at, False
                filled += 1
    return filled


def _covers(p: ParameterRows, held: list[Holding]) -> bool:
    """Whether every row of the parameter that is not padding is in the checkpoint."""
    left = p.rows != _zero(p.width)
    for h in held:
        left[h.offsets[h.offsets >= 0]] = False
    return not left.any()


def _zero(width: int) -> int:
    """The digest of a row of zeros."""
    return int(digest_slices(torch.zeros(1, width) if width > 1 else torch.zeros(1))[0][0])


class _RowIndex:
    """The rows of tensors of one width, sorted by their digests."""

    def __init__(self, rows: Mapping[str, np.ndarray], transposed: bool) -> None:
        self._rows, self._names, self._transposed = rows, list(rows), transposed
        sizes = [len(r) for r in rows.values()]
        every = np.concatenate([np.zeros(0, np.int64), *rows.values()])
        owner = np.repeat(np.arange(len(sizes)), sizes)
        number = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
        order = np.argsort(every, kind="stable")
        self._every, self._owner, self._number = every[order], owner[order], number[order]

    def runs(self, live: np.ndarray, at: int) -> Iterator[_Run]:
        """The runs that begin at a row of a live parameter, in each tensor that has it."""
        low, high = (
            np.searchsorted(self._every, live[at]),
            np.searchsorted(self._every, live[at], side="right"),
        )
        for k in range(low, min(high, low + _MOST_TRIED)):
            name, first = self._names[self._owner[k]], int(self._number[k])
            rows = self._rows[name]
            for step in (1, self._stride(rows, live, at, first)):
                if step:
                    there = rows[first::step][: len(live) - at]
                    count = _equal(there, live[at : at + len(there)])
                    yield _Run(name, self._transposed, at, first, count, step)

    @staticmethod
    def _stride(rows: np.ndarray, live: np.ndarray, at: int, first: int) -> int:
        """How far the next row of the parameter is behind this one in the tensor; 0 if it is not
        behind it."""
        if at + 1 >= len(live):
            return 0
        behind = np.flatnonzero(rows[first + 2 : first + 64] == live[at + 1])
        return int(behind[0]) + 2 if len(behind) else 0


def _equal(a: np.ndarray, b: np.ndarray) -> int:
    """The number of first entries that are equal."""
    unequal = a != b
    return int(unequal.argmax()) if unequal.any() else len(a)
