"""The plan of a call of `linear_grpo_loss` (see `matmul/plan.py`).

T = tokens   V = vocabulary   H = hidden size   E = the exponentials of `launch.py`
"""

import functools
from dataclasses import dataclass

from rlk_kernels.device import DeviceFacts
from rlk_kernels.matmul.plan import EpiloguePlan, LogitsShape
from rlk_kernels.ops.linear_logp.plan import PickPlan, plan_chunks, plan_pick, token_chunks
from rlk_kernels.ops.linear_logp.workspace import VocabChunk, all_at_once, block_elements, round_up

CHUNK_BYTES = 512 << 20
"""The most bytes of E, in the operands' dtype, of a chunk of tokens."""


def first_chunk(
    t: int, v: int, k: int, size: int, most: int, processors: int
) -> tuple[int, tuple[VocabChunk, ...]]:
    """(rows of the first chunk, vocabulary chunks of its E) that leave the fewest chunks of `most`
    rows after it; (0, ()) if a larger first chunk saves no chunk.

    CHUNK_BYTES of a single chunk include the statistics of its tiles, c hidden, and the lower
    halves of dhidden.
    """
    for others in range(-(-t // most) - 1):
        rows = min(t, round_up(t - others * most, 128))
        beside = rows * k * (2 if size == 2 else 1)
        block = (CHUNK_BYTES - 8 * rows * -(-v // 128)) // size - beside
        # several chunks need the lower halves of dweight anyway; a single chunk is better without
        for spares in (1,) if size != 2 else (2,) if others else (1, 2):
            vocab_chunks = all_at_once(rows, v, k, block, spares, processors)
            if vocab_chunks:
                return rows, vocab_chunks
    return 0, ()


def chunks_of(
    t: int, v: int, k: int, size: int, spare: bool, processors: int
) -> list[tuple[slice, tuple[VocabChunk, ...]]]:
    """(tokens, vocabulary chunks of their E) of each chunk: as few chunks as possible, all but the
    first of nearly the same size.

    size: bytes of an element. spare: whether a weight gradient has room for the first chunk.
    """
    wide = round_up(v)
    most = max(1, CHUNK_BYTES // (wide * size) // 128) * 128
    rows, vocab_chunks = first_chunk(t, v, k, size, most, processors) if spare else (0, ())
    whole = (VocabChunk(0, v, wide, 0, 0),)
    chunks = [(slice(0, rows), vocab_chunks)] if rows else []
    return chunks + [(slice(rows + x, rows + y), whole) for x, y in token_chunks(t - rows, most)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens whose E is in memory at the same time."""

    first: int
    last: int
    vocab: tuple[VocabChunk, ...]
    tiles: tuple[EpiloguePlan, ...]
    """The launch of each chunk of `vocab`."""
    block: int
    """Elements of the workspace's block."""

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.last)

    def nodes(self, x: VocabChunk) -> slice:
        """The nodes of the tree in a chunk of the vocabulary."""
        width = self.tiles[0].node_columns
        return slice(x.first // width, -(-x.last // width))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """How the loss and its gradients are launched."""

    pick: PickPlan
    chunks: tuple[TokenChunk, ...]
    dh_lo_rows: int
    """Rows of the hidden gradient with the lower halves of their accumulators in the block."""
    dh_lo_offset: int
    """The element of the block where these lower halves begin."""
    block: int
    """Elements of the block."""
    lends_lo: bool
    """E is stored in the lower halves of the weight gradient's partial accumulators too."""


@functools.lru_cache(maxsize=1024)
def plan_loss(
    shape: LogitsShape, weight_gradient: bool, facts: DeviceFacts, trusted: bool
) -> LossPlan:
    """The plan for at least one token."""
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
    rows = first.last if size == 2 and len(first.vocab) > 1 else 0  # dhidden continues over chunks
    return LossPlan(
        pick=plan_pick(shape, facts, trusted), chunks=chunks, dh_lo_rows=rows,
        dh_lo_offset=first.block,
        block=max(first.block + rows * k, *(x.block for x in chunks)),
        lends_lo=any(x.buffer == 2 for x in first.vocab),
    )  # fmt: skip
