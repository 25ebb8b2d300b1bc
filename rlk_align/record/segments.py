"""The sequences in the input of a trainer's forward: packed into a row, or padded on either side.

B = rows of the input, S = columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlk_align.engines.common.rows import ForwardRows
from rlk_align.errors import BadOption


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence in the input of a forward."""

    row: int
    columns: np.ndarray
    """int64 `[L]`: the columns of its tokens, in order."""
    ids: tuple[int, ...]


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


def rows_of(chosen: Sequence[tuple[int, int, Segment]], shape: tuple[int, int]) -> ForwardRows:
    """The rows of the chosen sequences in the output `[B, S, ...]` of a forward. chosen: the
    sample, the length of the prompt and the segment of each; shape: (B, S)."""
    index, sample, position, sampled = [], [], [], []
    for number, prompt, segment in chosen:
        length = len(segment.ids)
        at = np.arange(length)
        index.append(segment.row * shape[1] + segment.columns)
        sample.append(np.full(length, number))
        position.append(at)
        sampled.append((at >= prompt - 1) & (at < length - 1))
    return ForwardRows(
        np.concatenate(index),
        np.concatenate(sample),
        np.concatenate(position),
        np.concatenate(sampled),
        shape[0] * shape[1],
    )
