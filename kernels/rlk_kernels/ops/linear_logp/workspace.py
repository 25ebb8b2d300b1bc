"""The workspace: the memory of exponentials or gradients of logits, by chunk of the vocabulary.

They are stored in a separate block, or in gradients that are not written yet. The weight gradient
is computed in chunks of the vocabulary, from front to back. A row of it that is not written yet can
store other numbers, so the rows after a chunk store the exponentials or gradients of that chunk's
logits. So do the lower halves of the weight gradient's partial accumulators (`matmul/accumulate`)
before they are first written. The choice of memory changes time and memory use, and no bit of a
result.

    one at a time (`linear_logp`)           all at once (`linear_grpo_loss`)
    dlogits of chunk i in rows after it     the last chunks in the block, earlier chunks from
    or in the block, dropped after use      the end of the gradient towards its front

T = tokens   V = vocabulary   H = hidden size
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

UNIT = 256
"""The columns of all chunks but the last are a multiple of it."""
MOST_CHUNKS = 10
"""The largest number of chunks at the same time; more chunks would cost more than they save."""
CHOICES = 32
"""The number of widths of a chunk that are compared."""


@dataclass(frozen=True, slots=True)
class VocabChunk:
    """Columns first ... last of the vocabulary, and the memory of `width` numbers a token."""

    first: int
    last: int
    width: int
    """A multiple of UNIT."""
    buffer: int
    """0: the block   1: the weight gradient   2: its lower halves"""
    offset: int
    """The first element of the chunk in that buffer."""

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
    """The time of a chunk in steps of K: its logits in waves of 128 x 256 tiles, both gradients in
    one launch, the start of launches, and reading and writing the partial hidden gradient."""

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 256)

    hidden, weight = wide + UNIT, t + UNIT  # the K of a tile, plus its other work
    both = tiles(t, k) * hidden + tiles(wide, k) * weight
    small = min(hidden, weight)
    shared = max(-(-both // (processors * small)) * small, hidden, weight)
    return -(-tiles(t, wide) // processors) * k + shared + 500 + t * k // 16384


@functools.lru_cache(4096)
def _best(t: int, k: int, most: int, processors: int) -> int:
    """The width above most / 2 and up to `most` with the least time per column."""
    step = UNIT * max(1, most // (2 * UNIT * CHOICES))
    widths = range(most, max(most // 2, UNIT - 1), -step)
    return min(widths, key=lambda wide: _time(t, k, wide, processors) / wide)


@functools.lru_cache(1024)
def one_at_a_time(
    t: int, v: int, k: int, block: int, spare: bool, widest: int, processors: int
) -> tuple[VocabChunk, ...]:
    """Chunks of the vocabulary for t tokens, of at most `widest` columns, used one at a time.

    block: elements of the workspace's block. spare: whether there is a weight gradient of v x k
    elements, of which a chunk writes the rows first ... last.
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
    """Chunks of the vocabulary for t tokens, all in memory at the same time; None without room.

    block: elements of the workspace's block. spares: the number of further buffers of v x k
    elements (1 or 2), of which a chunk writes the rows first ... last.
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
    """Elements of the block that the chunks need."""
    return max((x.offset + t * x.width for x in vocab_chunks if x.buffer == 0), default=0)
