"""Megatron's layouts of canonical operators over ranks, beside those that all engines share.

Megatron fuses q, k, v of each key-value group (`q q k v | q q k v | ...`) and cuts the result into
one slice for each rank. It pads the vocabulary so that all ranks have equally many rows.
"""

from collections.abc import Iterator

from rlk_align.engines.common.layout import FeatureSlice, Layout, padded
from rlk_align.model.shape import ModelShape

LEAF = 16
"""The columns of a leaf of the kernels' log-sum-exp tree; a test compares it with theirs."""


def grouped_qkv(shape: ModelShape, tp: int, names: tuple[str, str, str]) -> Layout:
    """q, k and v by key-value group, cut into equal slices, which may cut through a head."""
    width, queries = shape.head_dim, shape.heads // shape.kv_heads * shape.head_dim
    order = []
    for group in range(shape.kv_heads):
        order.append(FeatureSlice(names[0], group * queries, (group + 1) * queries))
        order += [FeatureSlice(n, group * width, (group + 1) * width) for n in names[1:]]
    step = sum(p.size for p in order) // tp
    return Layout(tuple(tuple(_cut(order, r * step, (r + 1) * step)) for r in range(tp)))


def vocabulary(op: str, shape: ModelShape, tp: int) -> Layout:
    """The rows of the embedding or the head; the last ranks have the padding."""
    return padded(op, shape.vocab, padded_vocab(shape.vocab, tp) // tp, tp)


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary's size, rounded up so that every rank has equally many rows, and whole leaves
    of the tree in which the kernels sum over the vocabulary."""
    multiple = 1 if tp == 1 else LEAF * tp
    return -(-vocab // multiple) * multiple


def _cut(order: list[FeatureSlice], low: int, high: int) -> Iterator[FeatureSlice]:
    """The part of the concatenated pieces from `low` to `high`."""
    at = 0
    for p in order:
        first, last = max(low, at), min(high, at + p.size)
        if first < last:
            yield FeatureSlice(p.op, p.start + first - at, p.start + last - at)
        at += p.size
