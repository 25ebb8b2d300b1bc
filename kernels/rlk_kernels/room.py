"""Where what is held of the logits lies: a block of its own, and gradients not written yet.

The weight gradient is made in pieces of the vocabulary, front to back. Until its turn, a row of it
is memory like any other: rows behind a piece hold what is held of that piece's logits. The same is
true of the lower halves of its unfinished sums (`accumulate.py`), until they are first written.
Which piece lies where touches time and memory, and no bit of a result.

    one after another (`linear_logp`)       all at the same time (`linear_grpo_loss`)
    dlogits of piece i in rows behind it    the last pieces in the block, those before them from
    or in the block, forgotten after it     the end of the gradient on towards its front

T = tokens   V = vocabulary   H = hidden size
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

UNIT = 256
"""Columns of a piece are a multiple of it, but for the last one's."""
MOST_PIECES = 10
"""Of those that lie there at the same time: more would cost more than they save."""
CHOICES = 32
"""Widths of a piece that are compared."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns first ... last of the vocabulary, and where `wide` numbers a token lie for them."""

    first: int
    last: int
    wide: int
    """A multiple of UNIT."""
    memory: int
    """0: the block   1: the weight gradient   2: its lower halves"""
    at: int
    """Its first element there."""

    @property
    def columns(self) -> slice:
        return slice(self.first, self.last)

    def of(self, memories: Sequence[Tensor], rows: int) -> Tensor:
        """[rows, wide] in one of the flat memories."""
        return memories[self.memory][self.at : self.at + rows * self.wide].view(rows, self.wide)


def round_up(number: int, unit: int = UNIT) -> int:
    return -(-number // unit) * unit


def _time(t: int, k: int, wide: int, processors: int) -> int:
    """What a piece takes: its logits in waves of 128 x 256 tiles, both gradients together in one,
    its launches, and the unfinished hidden gradient, read and written. In steps of K."""

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 256)

    hidden, weight = wide + UNIT, t + UNIT  # a tile's K, and what is beside its products
    both = tiles(t, k) * hidden + tiles(wide, k) * weight
    small = min(hidden, weight)
    shared = max(-(-both // (processors * small)) * small, hidden, weight)
    return -(-tiles(t, wide) // processors) * k + shared + 500 + t * k // 16384


@functools.lru_cache(4096)
def _best(t: int, k: int, most: int, processors: int) -> int:
    """Of the widths up to `most` and above its half, the one that takes least time a column."""
    step = UNIT * max(1, most // (2 * UNIT * CHOICES))
    widths = range(most, max(most // 2, UNIT - 1), -step)
    return min(widths, key=lambda wide: _time(t, k, wide, processors) / wide)


@functools.lru_cache(1024)
def one_after_another(
    t: int, v: int, k: int, own: int, spare: bool, widest: int, processors: int
) -> tuple[Piece, ...]:
    """Pieces of the vocabulary for t tokens, one in use at a time; each at most `widest`.

    own: elements of the block. spare: whether there is a weight gradient of v x k elements, of
    which a piece's turn writes the rows first ... last.
    """
    pieces: list[Piece] = []
    first = 0
    while first < v:
        left = v - first
        behind = left * k // (t + k) if spare else 0
        most = max(min(max(own // t, behind), widest) // UNIT * UNIT, UNIT)
        wide = round_up(left) if left <= most else _best(t, k, most, processors)
        last = min(first + wide, v)
        lent = spare and (v - last) * k >= t * wide
        pieces.append(Piece(first, last, wide, int(lent), last * k if lent else 0))
        first = last
    return tuple(pieces)


@functools.lru_cache(1024)
def together(
    t: int, v: int, k: int, own: int, spares: int, processors: int
) -> tuple[Piece, ...] | None:
    """Pieces of the vocabulary for t tokens, all there at the same time, or None: no room.

    own: elements of the block. spares: how many memories of v x k elements there are besides (1 or
    2), of which a piece's turn writes the rows first ... last.
    """
    ends = [v * k // 8 * 8] * spares
    first = round_up(max(0, v - max(own, 0) // t // UNIT * UNIT))
    if first >= v:
        return None
    pieces = [Piece(first, v, round_up(v - first), 0, 0)]
    while pieces[-1].first > 0:
        last = pieces[-1].first
        end = max(ends)
        most = min((end - last * k) // t // UNIT * UNIT, last)
        if most < UNIT or len(pieces) == MOST_PIECES:
            return None
        wide = _best(t, k, most, processors)
        memory = ends.index(end)
        ends[memory] = end - t * wide
        pieces.append(Piece(last - wide, last, wide, 1 + memory, ends[memory]))
    return tuple(reversed(pieces))


def block_elements(pieces: Sequence[Piece], t: int) -> int:
    """Elements of the block that they need."""
    return max((x.at + t * x.wide for x in pieces if x.memory == 0), default=0)
