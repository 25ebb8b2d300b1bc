"""Which (sample, position) each row of a forward is, for all engines.

A forward's input is a grid of token ids `[B, S]`: one sequence and its padding in each row, or all
sequences packed into one row. The output has the grid's cells in some order; each cell that is not
padding is a row of the trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlk_align.model.prompts import Sample

Order = Literal["batch first", "sequence first"]
"""Whether an output is `[B, S, ...]` or `[S, B, ...]`, and so the order of its flattened cells."""


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of one forward's output that are not padding: arrays `[N]`."""

    index: np.ndarray
    """The index of each row in the flattened output."""
    sample: np.ndarray
    """-1 for a row that is not recorded."""
    position: np.ndarray
    sampled: np.ndarray
    """bool: whether the next token was sampled, so that the row's logits are wanted."""
    cells: int
    """The number of rows of the flattened output, padding included."""

    @classmethod
    def of_sequence(cls, sample: int, positions: range, sampled: range) -> "ForwardRows":
        """Consecutive positions of one sequence, which is alone in its forward."""
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
    """The id of the next token if it was sampled; otherwise -1."""
    starts: tuple[tuple[int, int], ...]
    """(row, column) of position 0 of each sequence."""

    @property
    def real(self) -> np.ndarray:
        """bool `[B, S]`: the cells that are not padding."""
        return self.owner >= 0

    def deal(self, rank: int, ranks: int) -> "TokenGrid":
        """The sequences rank, rank + ranks, ...; every rank has the same number of rows, the last
        of which may consist of padding."""
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
        """These columns, int64 `[C]`, in this order, with the starts that are among them."""
        at = {column: i for i, column in enumerate(columns.tolist())}
        return TokenGrid(
            ids=self.ids[:, columns],
            positions=self.positions[:, columns],
            owner=self.owner[:, columns],
            targets=self.targets[:, columns],
            starts=tuple((row, at[column]) for row, column in self.starts if column in at),
        )

    def rows(self, order: Order) -> ForwardRows:
        """The rows of an output, ordered by row and then by column of the grid."""
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
    """One sequence in each row, padded on `side` to the longest, rounded up to `multiple`."""
    longest = max(len(s.ids) for _, s in samples)
    length = -(-longest // multiple) * multiple
    first = [0 if side == "right" else length - len(s.ids) for _, s in samples]
    return _filled(samples, (len(samples), length), list(enumerate(first)))


def packed_grid(
    samples: Sequence[tuple[int, Sample]], multiple: int = 1, each: int = 1, least: int = 0
) -> TokenGrid:
    """All sequences in one row of at least `least` columns, padded to a multiple of `multiple`;
    each sequence is padded to a multiple of `each`."""
    *starts, end = np.cumsum([0, *(filled_length(s, each) for _, s in samples)]).tolist()
    length = -(-max(end, least) // multiple) * multiple
    return _filled(samples, (1, length), [(0, start) for start in starts])


def filled_length(sample: Sample, each: int) -> int:
    """The length of a sequence, rounded up to a multiple of `each`."""
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
    """The rows of a batch that an engine packed itself. The rows from `starts[i]` to `starts[i +
    1]` belong to sample `owners[i]`, or to none that is recorded, -1; `position` `[N]`: the
    position of each row; `sampled`: the positions of each sample whose logits are wanted."""
    sample = np.repeat(owners, np.diff(starts))
    first = np.array([r.start for r in sampled])[sample]
    stop = np.array([r.stop for r in sampled])[sample]
    wanted = (sample >= 0) & (position >= first) & (position < stop)
    return ForwardRows(np.arange(len(sample)), sample, position, wanted, len(sample))
