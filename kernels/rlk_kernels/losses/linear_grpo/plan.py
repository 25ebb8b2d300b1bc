"""The decisions of a call of `linear_grpo_loss`, made once (see `matmul/plan.py`).

T = tokens   V = vocabulary   H = hidden size   E = the exponentials of `launch.py`
"""

import functools
from dataclasses import dataclass

from rlk_kernels.device import DeviceFacts
from rlk_kernels.matmul.plan import EpiloguePlan, LogitsShape
from rlk_kernels.ops.linear_logp.plan import PickPlan, plan_chunks, plan_pick, token_chunks
from rlk_kernels.ops.linear_logp.workspace import VocabChunk, all_at_once, block_elements, round_up

CHUNK_BYTES = 512 << 20
"""Bytes that a chunk of tokens takes: its E, at the operands' dtype."""


def first_chunk(
    t: int, v: int, k: int, size: int, most: int, processors: int
) -> tuple[int, tuple[VocabChunk, ...]]:
    """Rows of the first chunk and the vocabulary chunks of its E, so that the fewest chunks of
    `most` rows come after it. No rows: that would save no chunk.

    If it is the only one, CHUNK_BYTES hold its statistics of tiles, c hidden, and the lower halves
    of dhidden too.
    """
    for others in range(-(-t // most) - 1):
        rows = min(t, round_up(t - others * most, 128))
        beside = rows * k * (2 if size == 2 else 1)
        block = (CHUNK_BYTES - 8 * rows * -(-v // 128)) // size - beside
        # other chunks need the lower halves of dweight anyway; one alone does better without
        for spares in (1,) if size != 2 else (2,) if others else (1, 2):
            vocab_chunks = all_at_once(rows, v, k, block, spares, processors)
            if vocab_chunks:
                return rows, vocab_chunks
    return 0, ()


def chunks_of(
    t: int, v: int, k: int, size: int, spare: bool, processors: int
) -> list[tuple[slice, tuple[VocabChunk, ...]]]:
    """Chunks of tokens and the vocabulary chunks of their E: as few as can be, all but the first of
    nearly the same size.

    size: bytes of an element. spare: whether there is a weight gradient with room for the first.
    """
    wide = round_up(v)
    most = max(1, CHUNK_BYTES // (wide * size) // 128) * 128
    rows, vocab_chunks = first_chunk(t, v, k, size, most, processors) if spare else (0, ())
    whole = (VocabChunk(0, v, wide, 0, 0),)
    chunks = [(slice(0, rows), vocab_chunks)] if rows else []
    return chunks + [(slice(rows + x, rows + y), whole) for x, y in token_chunks(t - rows, most)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens whose E is there at a time."""

    first: int
    last: int
    vocab: tuple[VocabChunk, ...]
    tiles: tuple[EpiloguePlan, ...]
    """How each chunk of `vocab` is launched."""
    block: int
    """Elements of the workspace's own block."""

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.last)

    def nodes(self, x: VocabChunk) -> slice:
        """The nodes of the tree that a chunk of the vocabulary has."""
        width = self.tiles[0].node_columns
        return slice(x.first // width, -(-x.last // width))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """How the loss and its gradients are launched."""

    pick: PickPlan
    chunks: tuple[TokenChunk, ...]
    dh_lo_rows: int
    """Rows of the hidden gradient whose partial accumulators have lower halves in the block."""
    dh_lo_offset: int
    """The element of the block where these lower halves begin."""
    block: int
    """How many elements the block has."""
    lends_lo: bool
    """E lies in the lower halves of the weight gradient's partial accumulators too."""


@functools.lru_cache(maxsize=1024)
def plan_loss(
    shape: LogitsShape, weight_gradient: bool, facts: DeviceFacts, trusted: bool
) -> LossPlan:
    """The plan of at least one token."""
    t, v, k, dtype, *_ = shape
    size = dtype.itemsize
    chunks = tuple(
        TokenChunk(
            first=part.start, last=part.stop, vocab=vocab,
            tiles=plan_chunks(shape, "exponentials", vocab, facts, trusted),
            block=block_elements(vocab, part.stop - part.start),
        )
        for part, vocab in chunks_of(t, v, k, size, weight_gradient, facts.processors)
    )  # fmt: skip
    first = chunks[0]
    rows = first.last if size == 2 and len(first.vocab) > 1 else 0  # dhidden goes on there
    return LossPlan(
        pick=plan_pick(shape, facts, trusted), chunks=chunks, dh_lo_rows=rows,
        dh_lo_offset=first.block,
        block=max(first.block + rows * k, *(x.block for x in chunks)),
        lends_lo=any(x.buffer == 2 for x in first.vocab),
    )  # fmt: skip
