"""Which (sample, position) each row of a forward is: the one answer for all engines.

A forward's input is a grid of token ids `[B, S]`: one sequence a row and padding beside it, or all
sequences packed into one row. Its output has the grid's cells in some order; what is no padding is
a row of the trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlk_align.model.prompts import Sample

Order = Literal["batch first", "sequence first"]
"""Whether the cells of an output, flattened, come from `[B, S, ...]` or from `[S, B, ...]`."""


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of one forward's output that are no padding: arrays `[N]`."""

    index: np.ndarray
    """Where each lies in the output, flattened."""
    sample: np.ndarray
    position: np.ndarray
    sampled: np.ndarray
    """bool: whether the token after it was sampled, so that its logits are wanted."""
    cells: int
    """Rows of the output, flattened, padding included."""

    @classmethod
    def of_sequence(cls, sample: int, positions: range, sampled: range) -> "ForwardRows":
        """A stretch of one sequence, alone in its forward."""
        position = np.arange(positions.start, positions.stop)
        return cls(
            np.arange(len(position)),
            np.full(len(position), sample),
            position,
            (position >= sampled.start) & (position < sampled.stop),
            len(position),
        )


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """Several sequences in one input tensor: int64 arrays `[B, S]`."""

    ids: np.ndarray
    """0 at padding."""
    positions: np.ndarray
    """0 at padding."""
    owner: np.ndarray
    """The sample of each cell; -1 at padding."""
    targets: np.ndarray
    """The sampled id that follows; -1 where none was sampled."""
    starts: tuple[tuple[int, int], ...]
    """(row, column) of position 0 of each sequence."""

    @property
    def real(self) -> np.ndarray:
        """bool `[B, S]`: what is no padding."""
        return self.owner >= 0

    def deal(self, rank: int, ranks: int) -> "TokenGrid":
        """The sequences rank, rank + ranks, ...; of as many rows for every rank, the last of which
        may be padding alone."""
        lacking = -len(self.ids) % ranks

        def dealt(x: np.ndarray, blank: int) -> np.ndarray:
            return np.pad(x, ((0, lacking), (0, 0)), constant_values=blank)[rank::ranks]

        return TokenGrid(
            ids=dealt(self.ids, 0),
            positions=dealt(self.positions, 0),
            owner=dealt(self.owner, -1),
            targets=dealt(self.targets, -1),
            starts=tuple((r // ranks, c) for r, c in self.starts if r % ranks == rank),
        )

    def select(self, columns: np.ndarray) -> "TokenGrid":
        """Some columns, int64 `[C]`, in that order; positions 0 that are not among them have no
        start."""
        at = {column: i for i, column in enumerate(columns.tolist())}
        return TokenGrid(
            ids=self.ids[:, columns],
            positions=self.positions[:, columns],
            owner=self.owner[:, columns],
            targets=self.targets[:, columns],
            starts=tuple((row, at[column]) for row, column in self.starts if column in at),
        )

    def rows(self, order: Order) -> ForwardRows:
        """The rows of an output, by sequence and position within each row of the grid."""
        row, column = np.nonzero(self.real)
        count, length = self.ids.shape
        index = row * length + column if order == "batch first" else column * count + row
        cells = (row, column)
        return ForwardRows(
            index,
            self.owner[cells],
            self.positions[cells],
            self.targets[cells] >= 0,
            self.ids.size,
        )


def padded_grid(samples: Sequence[tuple[int, Sample]], side: str, multiple: int = 1) -> TokenGrid:
    """One sequence a row, padded on `side` to the longest, rounded up to `multiple`."""
    longest = max(len(s.ids) for _, s in samples)
    length = -(-longest // multiple) * multiple
    first = [0 if side == "right" else length - len(s.ids) for _, s in samples]
    return _filled(samples, (len(samples), length), list(enumerate(first)))


def packed_grid(
    samples: Sequence[tuple[int, Sample]], multiple: int = 1, each: int = 1, least: int = 0
) -> TokenGrid:
    """All sequences in one row of `least` columns or more, filled up to `multiple`, each sequence
    filled up to a multiple of `each`."""
    *starts, end = np.cumsum([0, *(filled_length(s, each) for _, s in samples)]).tolist()
    length = -(-max(end, least) // multiple) * multiple
    return _filled(samples, (1, length), [(0, start) for start in starts])


def filled_length(sample: Sample, each: int) -> int:
    """The length of a sequence with what fills it up to a multiple of `each`."""
    return -(-len(sample.ids) // each) * each


def _filled(
    samples: Sequence[tuple[int, Sample]], shape: tuple[int, int], starts: list[tuple[int, int]]
) -> TokenGrid:
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    owner, targets = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    for (number, sample), (row, column) in zip(samples, starts, strict=True):
        here = (row, slice(column, column + len(sample.ids)))
        ids[here] = sample.ids
        positions[here] = np.arange(len(sample.ids))
        owner[here] = number
        wanted = sample.sampled_positions
        targets[row, column + wanted.start : column + wanted.stop] = sample.response_ids
    return TokenGrid(ids, positions, owner, targets, tuple(starts))


def packed_rows(
    owners: np.ndarray, starts: np.ndarray, position: np.ndarray, sampled: Sequence[range]
) -> ForwardRows:
    """The rows of a batch that an engine packed itself: consecutive rows of `owners[i]` from
    `starts[i]` on, `[requests + 1]`, at `position` `[N]`; `sampled`: by sample, where logits are
    wanted."""
    sample = np.repeat(owners, np.diff(starts))
    first = np.array([r.start for r in sampled])[sample]
    stop = np.array([r.stop for r in sampled])[sample]
    wanted = (position >= first) & (position < stop)
    return ForwardRows(np.arange(len(sample)), sample, position, wanted, len(sample))
