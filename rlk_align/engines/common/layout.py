"""Which slices of which canonical operators each tensor-parallel rank has, and in what order.

Engines fuse operators and cut the result into one slice for each rank. A layout declares these
slices, for weights and for activations; nothing is inferred from shapes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from rlk_align.engines.common.parameters import Shard
from rlk_align.model.operators import Size
from rlk_align.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class FeatureSlice:
    """A slice of one canonical operator's features."""

    op: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """For each rank, the consecutive pieces of its local dimension."""

    ranks: tuple[tuple[FeatureSlice, ...], ...]

    @property
    def ops(self) -> list[str]:
        return list(dict.fromkeys(p.op for pieces in self.ranks for p in pieces))

    def holders(self, op: str) -> list[tuple[int, int, FeatureSlice]]:
        """(rank, offset in that rank's slice, piece) of `op`, in canonical order. Each feature
        occurs once: of copies, that of the lowest rank."""
        lowest: dict[int, tuple[int, int, FeatureSlice]] = {}
        for rank, pieces in enumerate(self.ranks):
            offset = 0
            for p in pieces:
                if p.op == op and p.size:
                    lowest.setdefault(p.start, (rank, offset, p))
                offset += p.size
        return [lowest[start] for start in sorted(lowest)]

    def copies(self, op: str) -> Iterator[tuple[int, list[tuple[int, FeatureSlice]]]]:
        """(rank, its (offset, piece) of `op` that lower ranks have too), for ranks with copies."""
        first = {p.start: rank for rank, _, p in self.holders(op)}
        for rank in range(len(self.ranks)):
            pieces = [(at, p) for at, p in self.local(rank) if p.op == op and p.size]
            copies = [(at, p) for at, p in pieces if first.get(p.start, rank) != rank]
            if copies:
                yield rank, copies

    def assemble(self, op: str, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """All of `op` along `dim`, from the local tensors of all ranks in rank order. Whatever a
        local tensor has beyond its pieces is padding."""
        slices = [parts[r].narrow(dim, at, p.size) for r, at, p in self.holders(op)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim)

    def shards(self, op: str, dim: int) -> tuple[Shard, ...]:
        """The shard of `op` that each rank has; none for a layout of one rank."""
        if len(self.ranks) == 1:
            return ()
        shards: list[Shard] = []
        for rank, pieces in enumerate(self.ranks):
            for p in pieces:
                if p.op != op or not p.size:
                    continue
                start = p.start
                # Adjacent pieces of one rank form one shard.
                if shards and shards[-1].rank == rank and shards[-1].stop == start:
                    start = shards.pop().start
                shards.append(Shard(rank, dim, start, p.stop))
        return tuple(shards)

    def named(self, suffix: str) -> "Layout":
        """The same layout, with `suffix` added to each operator's name."""
        return Layout(
            tuple(tuple(replace(p, op=p.op + suffix) for p in pieces) for pieces in self.ranks)
        )

    def local(self, rank: int) -> Iterator[tuple[int, FeatureSlice]]:
        """(offset, piece) of one rank."""
        offset = 0
        for p in self.ranks[rank]:
            yield offset, p
            offset += p.size


def even(op: str, size: int, tp: int) -> Layout:
    """One operator in equal slices."""
    step = size // tp
    return Layout(tuple((FeatureSlice(op, r * step, (r + 1) * step),) for r in range(tp)))


def kv_heads(op: str, shape: ModelShape, tp: int) -> Layout:
    """Heads of k or v as attention reads them; with fewer heads than ranks, ranks share one."""
    if shape.kv_heads >= tp:
        return even(op, shape.kv_heads * shape.head_dim, tp)
    heads = [r * shape.kv_heads // tp for r in range(tp)]
    return Layout(
        tuple((FeatureSlice(op, h * shape.head_dim, (h + 1) * shape.head_dim),) for h in heads)
    )


def padded(op: str, size: int, step: int, tp: int) -> Layout:
    """One operator in slices of `step` up to `size`; beyond that, the last ranks have padding."""
    ends = [min(r * step, size) for r in range(tp + 1)]
    return Layout(tuple((FeatureSlice(op, a, b),) for a, b in pairwise(ends)))


def whole(op: str, size: int, tp: int) -> Layout:
    """All of one operator on each rank."""
    return Layout(((FeatureSlice(op, 0, size),),) * tp)


def fused(*layouts: Layout) -> Layout:
    """Several operators in one tensor: each rank has its pieces of each, one after another."""
    return Layout(
        tuple(sum(pieces, ()) for pieces in zip(*(x.ranks for x in layouts), strict=True))
    )


def in_parts(op: str, sizes: Sequence[int], tp: int) -> Layout:
    """One operator whose features are parts of these sizes: each rank has an equal slice of the
    first part, then of the second, and so on."""
    starts = [*accumulate(sizes, initial=0)]
    return Layout(
        tuple(
            tuple(
                FeatureSlice(op, at + r * size // tp, at + (r + 1) * size // tp)
                for at, size in zip(starts, sizes, strict=False)
            )
            for r in range(tp)
        )
    )


def of_fused(layer: str, module: str, shape: ModelShape, tp: int = 1) -> Layout:
    """The layout of a layer's module that the checkpoint fuses. Several ranks share its heads of
    keys, by which its rows must then be ordered."""
    pieces = [FeatureSlice(f"{layer}.{p.op}", p.start, p.stop) for p in shape.fused_rows[module]]
    assert tp == 1 or shape.family.by_key_head
    step = len(pieces) // tp
    return Layout(tuple(tuple(pieces[r * step : (r + 1) * step]) for r in range(tp)))


def of_outputs(sites: Sequence[str], shape: ModelShape, tp: int) -> Layout | None:
    """The layout of the values of these sites, which are fused in one tensor if there are several,
    by the catalogue; None if each rank has every feature."""
    operators = {site: shape.operator_of(site) for site in sites}
    if any(o.sharding.join != "concatenate" for o in operators.values()):
        return None
    return fused(*(_of_features(s, o.features, shape.of_site(s), tp) for s, o in operators.items()))


def _of_features(op: str, features: Size, shape: ModelShape, tp: int) -> Layout:
    if features == "kv_heads":
        return kv_heads(op, shape, tp)
    parts = shape.delta_parts if features == "delta_inputs" else (shape.size(features),)
    return in_parts(op, parts, tp)
