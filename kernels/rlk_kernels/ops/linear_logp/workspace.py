"""The workspace: where exponentials or gradients of logits lie, by chunk of the vocabulary.

They lie in a block of their own, or in gradients that are not written yet. The weight gradient is
made in chunks of the vocabulary, front to back. Until its turn, a row of it is memory like any
other: rows behind a chunk hold what is stored of that chunk's logits. The same is true of the lower
halves of its partial accumulators (`matmul/accumulate`), until they are first written. Which chunk
lies where touches time and memory, and no bit of a result.

    one at a time (`linear_logp`)           all at once (`linear_grpo_loss`)
    dlogits of chunk i in rows behind it    the last chunks in the block, those before them from
    or in the block, forgotten after it     the end of the gradient on towards its front

T = tokens   V = vocabulary   H = hidden size
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

UNIT = 256
"""Columns of a chunk are a multiple of it, but for the last one's."""
MOST_CHUNKS = 10
"""The largest number of chunks that lie there at the same time: more would cost more than they
save."""
CHOICES = 32
"""Widths of a chunk that are compared."""


@dataclass(frozen=True, slots=True)
class VocabChunk:
    """Columns first ... last of the vocabulary, and where `wide` numbers a token lie for them."""

    first: int
    last: int
    width: int
    """A multiple of UNIT."""
    buffer: int
    """0: the block   1: the weight gradient   2: its lower halves"""
    offset: int
    """Where the chunk begins in that buffer, in elements."""

    @property
    def columns(self) -> slice:
        return slice(self.first, self.last)

    def view(self, buffers: Sequence[Tensor], rows: int) -> Tensor:
        """[rows, width] in one of the flat buffers."""
        return buffers[self.buffer][self.offset : self.offset + rows * self.width].view(
            rows, self.width
        )


def round_up(number: int, unit: int = UNIT) -> int:
    return -(-number // unit) * unit


def _time(t: int, k: int, wide: int, processors: int) -> int:
    """What a chunk takes: its logits in waves of 128 x 256 tiles, both gradients together in one,
    its launches, and the partial hidden gradient, read and written. In steps of K."""

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 256)

    hidden, weight = wide + UNIT, t + UNIT  # a tile's K, and what is beside its products
    both = tiles(t, k) * hidden + tiles(wide, k) * weight
    small = min(hidden, weight)
    shared = max(-(-both // (processors * small)) * small, hidden, weight)
    return -(-tiles(t, wide) // processors) * k + shared + 500 + t * k // 16384


@functools.lru_cache(4096)
def _best(t: int, k: int, most: int, processors: int) -> int:
    """The width up to `most` and above half of it that takes the least time per column."""
    step = UNIT * max(1, most // (2 * UNIT * CHOICES))
    widths = range(most, max(most // 2, UNIT - 1), -step)
    return min(widths, key=lambda wide: _time(t, k, wide, processors) / wide)


@functools.lru_cache(1024)
def one_at_a_time(
    t: int, v: int, k: int, block: int, spare: bool, widest: int, processors: int
) -> tuple[VocabChunk, ...]:
    """Chunks of the vocabulary for t tokens, one in use at a time; each at most `widest`.

    block: elements of the workspace. spare: whether there is a weight gradient of v x k elements,
    of which a chunk's turn writes the rows first ... last.
    """
    vocab_chunks: list[VocabChunk] = []
    first = 0
    while first < v:
        remaining = v - first
        behind = remaining * k // (t + k) if spare else 0
        most = max(min(max(block // t, behind), widest) // UNIT * UNIT, UNIT)
        wide = round_up(remaining) if remaining <= most else _best(t, k, most, processors)
        last = min(first + wide, v)
        lent = spare and (v - last) * k >= t * wide
        vocab_chunks.append(VocabChunk(first, last, wide, int(lent), last * k if lent else 0))
        first = last
    return tuple(vocab_chunks)


@functools.lru_cache(1024)
def all_at_once(
    t: int, v: int, k: int, block: int, spares: int, processors: int
) -> tuple[VocabChunk, ...] | None:
    """Chunks of the vocabulary for t tokens, all there at the same time, or None: no room.

    block: elements of the workspace. spares: how many buffers of v x k elements there are besides
    (1 or 2), of which a chunk's turn writes the rows first ... last.
    """
    ends = [v * k // 8 * 8] * spares
    first = round_up(max(0, v - max(block, 0) // t // UNIT * UNIT))
    if first >= v:
        return None
    vocab_chunks = [VocabChunk(first, v, round_up(v - first), 0, 0)]
    while vocab_chunks[-1].first > 0:
        last = vocab_chunks[-1].first
        end = max(ends)
        most = min((end - last * k) // t // UNIT * UNIT, last)
        if most < UNIT or len(vocab_chunks) == MOST_CHUNKS:
            return None
        wide = _best(t, k, most, processors)
        buffer = ends.index(end)
        ends[buffer] = end - t * wide
        vocab_chunks.append(VocabChunk(last - wide, last, wide, 1 + buffer, ends[buffer]))
    return tuple(reversed(vocab_chunks))


def block_elements(vocab_chunks: Sequence[VocabChunk], t: int) -> int:
    """Elements of the block that they need."""
    return max((x.offset + t * x.width for x in vocab_chunks if x.buffer == 0), default=0)
