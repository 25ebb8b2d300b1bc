"""The choice of the rows that are recomputed: a seeded sample, and rows that a comparison names."""

import numpy as np

from rlk_align.model.sites import RowIndex
from rlk_align.results import Comparison

ROWS = 1024
"""Rows that are drawn."""
SAMPLED_ROWS = 256
"""Rows that are drawn from those at which a token was sampled."""
KEYS = 16384
"""Rows of the sequences from which they are drawn, because attention reads all of these."""
SEED = 20261122


def choose_rows(
    comparison: Comparison, worst: list[int], valued: np.ndarray, index: RowIndex
) -> np.ndarray:
    """Returns row numbers of the batch, ascending: a sample of the rows with values (the mask
    `valued`), the row at which each site first introduced a difference, and up to ROWS rows around
    each of the rows `worst` in its sequence. The last row of a sequence is never among them: it
    gives no log-prob, and decode does not compute it."""
    random = np.random.default_rng(SEED)
    counts = np.diff(np.concatenate([[0], np.cumsum(valued)])[index.offsets])
    order = random.permutation(len(counts))
    fit = np.cumsum(counts[order]) <= KEYS
    fit[0] = True
    inside = np.concatenate([_rows_of(index, s) for s in order[fit]])
    sampled = np.concatenate([_sampled_rows(index, s) for s in order[fit]])
    drawn = ((inside, ROWS), (sampled, SAMPLED_ROWS))
    chosen = [_draw(random, rows[valued[rows]], count) for rows, count in drawn]
    introduced = [s.first_introduced for e in comparison.edges for s in e.sites]
    first = [index.offsets[c[0]] + c[1] for c in dict.fromkeys(introduced) if c is not None]
    chosen.append(np.array(first, dtype=np.int64))
    chosen += [_rows_about(index, row) for row in worst]
    return np.setdiff1d(np.concatenate(chosen), index.offsets[1:] - 1)


def _rows_of(index: RowIndex, sample: int) -> np.ndarray:
    return np.arange(index.offsets[sample], index.offsets[sample + 1])


def _rows_about(index: RowIndex, row: int) -> np.ndarray:
    """The first ROWS rows of a sequence or, if the row lies behind them, the last ones up to it."""
    sample, position = index.locate(row)
    first = max(0, position + 1 - ROWS)
    return _rows_of(index, sample)[first : first + ROWS]


def _sampled_rows(index: RowIndex, sample: int) -> np.ndarray:
    at = index.batch.samples[sample].sampled_positions
    return np.arange(at.start, at.stop) + index.offsets[sample]


def _draw(random: np.random.Generator, rows: np.ndarray, count: int) -> np.ndarray:
    return random.choice(rows, min(count, len(rows)), replace=False)
