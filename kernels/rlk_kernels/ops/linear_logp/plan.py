"""The plans of a forward and a backward of `linear_logp` (see `matmul/plan.py`).

T = tokens   V = vocabulary   H = hidden size
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_kernels.device import DeviceFacts
from rlk_kernels.matmul.plan import EpiloguePlan, LogitsShape, plan_epilogue, tma_reads
from rlk_kernels.matmul.split import segments
from rlk_kernels.matmul.tiles import PICK, PICK_FLOAT32, SAFE, Tile
from rlk_kernels.ops.linear_logp.workspace import VocabChunk, block_elements, one_at_a_time

STATISTICS_BYTES = 48 << 20
"""The most bytes of tile statistics at a time in the forward."""
WORKSPACE_BYTES = 288 << 20
"""The most bytes at a time in the backward: dlogits, a copy of the hidden states, and the lower
halves of partial accumulators."""
ONE_PASS_ELEMENTS = 16384 * 4096
"""Elements of the hidden gradient up to which one pass computes both gradients."""


def token_chunks(t: int, most: int) -> list[tuple[int, int]]:
    """[0, t) in equal chunks of at most `most` rows, which are multiples of 128."""
    count = max(1, -(-t // max(most, 128)))
    size = max(128, -(-t // count // 128) * 128)
    return [(start, min(start + size, t)) for start in range(0, t, size)]


def shape_of(h: Tensor, w: Tensor, logit_dtype: torch.dtype, facts: DeviceFacts) -> LogitsShape:
    """The shape of the logits of h[T, H] and w[V, H]."""
    readable = facts.tma and tma_reads(h) and tma_reads(w)
    return LogitsShape(h.shape[0], w.shape[0], h.shape[1], h.dtype, logit_dtype, readable)


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPlan:
    """How the logits of ids are launched."""

    tile: Tile
    segment: int
    last_segment: int


def plan_pick(shape: LogitsShape, facts: DeviceFacts, trusted: bool) -> PickPlan:
    """The plan for the logits of the ids of all tokens."""
    tile = PICK_FLOAT32
    if shape.dtype != torch.float32 and not facts.interpreted:
        tile = PICK if trusted else SAFE
    segment, last = segments(shape.k, shape.dtype, shape.logit_dtype)
    return PickPlan(tile=tile, segment=segment, last_segment=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """How a forward is launched."""

    pick: PickPlan
    tiles: EpiloguePlan
    nodes: int
    """Nodes of the tree, one for each tile of columns."""
    chunks: tuple[tuple[int, int], ...]
    """(first, last) of the tokens whose statistics are in memory at the same time."""


@functools.lru_cache(maxsize=1024)
def plan_forward(
    shape: LogitsShape, entropy: bool, facts: DeviceFacts, trusted: bool
) -> ForwardPlan:
    """The plan of a forward."""
    tiles = plan_epilogue(shape, "statistics", True, facts, trusted)
    nodes = -(-shape.columns // tiles.tile.n)
    most = STATISTICS_BYTES // (4 * (3 if entropy else 2) * nodes)
    return ForwardPlan(
        pick=plan_pick(shape, facts, trusted), tiles=tiles, nodes=nodes,
        chunks=tuple(token_chunks(shape.tokens, most)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPlan:
    """How a backward is launched."""

    chunks: tuple[tuple[int, int], ...]
    """(first, last) of the tokens of each chunk; no chunk is longer than the first."""
    one_pass: bool
    """Both gradients are computed from the same dlogits."""
    vocab: tuple[VocabChunk, ...]
    tiles: tuple[EpiloguePlan, ...]
    """The launch of each chunk of `vocab`."""
    block: int
    """Elements of the workspace's block."""


@functools.lru_cache(maxsize=1024)
def plan_backward(
    shape: LogitsShape, weight_gradient: bool, facts: DeviceFacts, trusted: bool
) -> BackwardPlan:
    """The plan of a backward for at least one token."""
    t, v, k, dtype, *_ = shape
    chunks = tuple(token_chunks(t, ONE_PASS_ELEMENTS // max(k, 1)))
    longest, one_pass, size = chunks[0][1], len(chunks) == 1, dtype.itemsize
    free = WORKSPACE_BYTES // size - longest * k * (2 if size == 2 else 1)
    widest = v if one_pass else longest  # the bytes include the lower halves of its sums
    vocab = one_at_a_time(longest, v, k, free, weight_gradient, widest, facts.processors)
    return BackwardPlan(
        chunks=chunks, one_pass=one_pass, vocab=vocab,
        tiles=plan_chunks(shape, "gradient", vocab, facts, trusted),
        block=block_elements(vocab, longest),
    )  # fmt: skip


def plan_chunks(
    shape: LogitsShape, epilogue, vocab: tuple[VocabChunk, ...], facts: DeviceFacts, trusted: bool
) -> tuple[EpiloguePlan, ...]:
    """The plans of the launches that store tiles, one for each chunk of the vocabulary."""
    size = shape.dtype.itemsize
    return tuple(
        plan_epilogue(
            shape._replace(columns=x.last - x.first), epilogue,
            facts.tma and x.offset * size % 16 == 0, facts, trusted,
        )
        for x in vocab
    )  # fmt: skip
