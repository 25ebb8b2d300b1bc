"""The sequences in the input of a trainer's forward: packed into a row, or padded on either side.

B = rows of the input, S = columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlk_align.engines.common.rows import ForwardRows, Order
from rlk_align.errors import BadOption


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence in the input of a forward."""

    row: int
    columns: np.ndarray
    """int64 `[L]`: the columns of its tokens, in order."""
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sequence of a forward that is recorded."""

    number: int
    """Its sample."""
    prompt: int
    """The length of its prompt."""
    segment: Segment

    @property
    def sampled(self) -> np.ndarray:
        """int64: the positions whose next token was sampled."""
        return np.arange(self.prompt - 1, len(self.segment.ids) - 1)

    @property
    def targets(self) -> np.ndarray:
        """int64: the tokens that were sampled there."""
        return np.array(self.segment.ids, dtype=np.int64)[self.sampled + 1]


def segments(
    ids: np.ndarray,
    mask: np.ndarray | None,
    positions: np.ndarray | None,
    boundaries: np.ndarray | None,
) -> Iterator[Segment]:
    """The sequences of an input. ids: int `[B, S]`; mask: `[B, S]`, 0 at padding; positions: `[B,
    S]` or `[1, S]`, which start again where another sequence begins; boundaries: `[N + 1]`, the
    first column of each of N packed sequences, and the end. Raises BadOption for a mask that is not
    of this form."""
    count, length = ids.shape
    if mask is not None and (mask.shape != ids.shape or not np.isin(mask, (0, 1)).all()):
        raise BadOption(
            f"an attention mask of shape {list(mask.shape)} is not understood",
            "give a mask of zeros and ones for each token, or none",
        )
    real = np.ones(ids.shape, dtype=bool) if mask is None else mask.astype(bool)
    for row in range(count):
        columns = np.flatnonzero(real[row])
        if boundaries is not None:
            starts = np.isin(columns, boundaries)
        elif positions is not None:
            of_row = np.broadcast_to(positions, (count, length))[row, columns]
            starts = np.diff(of_row, prepend=of_row[:1] - 2) != 1
        else:
            starts = np.arange(len(columns)) == 0
        for part in np.split(columns, np.flatnonzero(starts)):
            if len(part):
                yield Segment(row, part, tuple(ids[row, part].tolist()))


def rows_of(chosen: Sequence[Chosen], shape: tuple[int, int], order: Order) -> ForwardRows:
    """The rows of the chosen sequences in the output of a forward, whose cells have this order.
    shape: (B, S)."""
    if not chosen:
        nothing = np.zeros(0, dtype=np.int64)
        return ForwardRows(nothing, nothing, nothing, nothing.astype(bool), shape[0] * shape[1])
    index, sample, position, sampled = [], [], [], []
    for each in chosen:
        segment, length = each.segment, len(each.segment.ids)
        at = np.arange(length)
        first = order == "batch first"
        cells = segment.row * shape[1] + segment.columns
        index.append(cells if first else segment.columns * shape[0] + segment.row)
        sample.append(np.full(length, each.number))
        position.append(at)
        sampled.append((at >= each.prompt - 1) & (at < length - 1))
    return ForwardRows(
        np.concatenate(index),
        np.concatenate(sample),
        np.concatenate(position),
        np.concatenate(sampled),
        shape[0] * shape[1],
    )
