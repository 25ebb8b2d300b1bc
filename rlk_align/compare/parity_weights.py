"""Compares the weights of both sides: which slices differ, which ranks hold them, and how they
differ.

Both sides keep a digest of each slice of a parameter along both dimensions, so that permuted rows
are distinguished from rows with other values.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from rlk_align.model.operators import OPERATORS
from rlk_align.results import Mismatch, SideName
from rlk_align.trace.reader import Trace, Weight

_SHOWN = 4
"""Runs of slices that a mismatch names."""

Run = tuple[int, int, int]
"""(start, stop, the other side's start): slices that are elsewhere on the other side."""
Shards = list[tuple[int, int, int, int]]
"""(rank, dimension, start, stop); empty where one rank holds everything."""


def check_weights(rollout: Trace, train: Trace) -> list[Mismatch]:
    """Returns every canonical parameter that differs, in the order of the model. Where one side has
    a narrower dtype, the other side's parameter is rounded to it before they are compared. What an
    imported side did not record is not compared."""
    a, b = rollout.weights, train.weights
    named = {digest: name for name, w in a.items() for digest in (w.digest, *w.casts.values())}
    mismatches = []
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            if (rollout if name not in a else train).record.imported:
                continue
            here = ["present" if name in side else "absent" for side in (a, b)]
            mismatches.append(Mismatch(kind="weights", name=name, rollout=here[0], train=here[1]))
            continue
        mine, theirs = _in_one_dtype(a[name], b[name])
        if mine.shape != theirs.shape:
            mismatches.append(_mismatch(a[name], b[name], [], ""))
        elif stale := _stale_copies(mine, theirs):
            mismatches.append(_mismatch(a[name], b[name], *stale))
        elif mine.digest != theirs.digest:
            first = _Recorded(rollout, name, "" if mine is a[name] else mine.dtype)
            second = _Recorded(train, name, "" if theirs is b[name] else theirs.dtype)
            found = difference(first, second, _SIDES, rollout.record.shape.head_dim)
            ranks, detail = found.ranks, found.detail
            other = named.get(theirs.digest)
            # A stale copy of a tied head differs from the embedding, too.
            if other is not None and theirs.digest != mine.held:
                detail = f"train holds what the rollout holds as {other}"
            old = train.record.old_weights.get(name, "")
            detail = "; ".join(filter(None, [detail, old]))
            mismatches.append(_mismatch(a[name], b[name], ranks, detail))
        elif _expands_by_another(name, mine, theirs):
            mismatches.append(_mismatch(a[name], b[name], [], ""))
    return mismatches


def _expands_by_another(name: str, a: Weight, b: Weight) -> bool:
    """Whether a side whose copy is right expands latents in prefills by a parameter with other
    values."""
    operator = OPERATORS.get(name.rpartition(".")[2])
    return operator is not None and operator.formula == "latent_attention" and bool(a.held + b.held)


def cast_sides(rollout: Trace, train: Trace) -> dict[SideName, str]:
    """Returns for each side that holds the other side's weights rounded the dtype of its
    weights."""
    found: dict[SideName, str] = {}
    b = train.weights
    for name, mine in rollout.weights.items():
        if name in b and mine.digest != b[name].digest:
            as_compared = _in_one_dtype(mine, b[name])
            if as_compared[0].digest == as_compared[1].digest:
                side: SideName = "train" if as_compared[0] is not mine else "rollout"
                found[side] = as_compared[0].dtype
    return found


def _in_one_dtype(a: Weight, b: Weight) -> tuple[Weight, Weight]:
    """Rounds the wider parameter to the dtype of the other, where that digest is known and the
    values differ."""
    if a.digest == b.digest:
        return a, b
    return a.rounded(b.dtype) or a, b.rounded(a.dtype) or b


def _mismatch(a: Weight, b: Weight, ranks: list[int], detail: str) -> Mismatch:
    sides = [f"{w.dtype}{list(w.shape)} {w.digest[:12]}" for w in (a, b)]
    copies: dict[SideName, Weight] = {"rollout": a, "train": b}
    copies = {side: w for side, w in copies.items() if w.derived}
    said = [_copy_words(side, w, b if w is a else a) for side, w in copies.items()]
    return Mismatch(
        kind="weights",
        name=a.name,
        rollout=sides[0],
        train=sides[1],
        ranks=ranks,
        detail="; ".join(filter(None, [*said, detail])),
        derived_copy={side: w.derived for side, w in copies.items()},
    )


def _copy_words(side: SideName, copy: Weight, other: Weight) -> str:
    """Says that a side's values are those of a derived copy, and what its parameter is."""
    match copy.held:
        case "":
            parameter = "is empty"
        case other.digest:
            parameter = "has the other side's values: the copy is stale"
        case _:
            parameter = "has other values than the copy and the other side"
    return (
        f"derived copy: the {side} computes with a copy in {copy.derived}, whose parameter "
        f"{parameter}"
    )


def _stale_copies(a: Weight, b: Weight) -> tuple[list[int], str] | None:
    """Returns the ranks whose copy of a replicated parameter differs from the other side's, where
    the copies of other ranks do not."""
    for side, weight, other in (("rollout", a, b), ("train", b, a)):
        right = [rank for rank, digest in weight.copies.items() if digest == other.digest]
        stale = [rank for rank in weight.copies if rank not in right]
        if stale and right:
            who = f"{_ranks(stale)} {'has' if len(stale) == 1 else 'have'}"
            return stale, f"{side}: {who} another copy than rank {right[0]}"
    return None


class Sides(NamedTuple):
    """The names of the two sides in the words of a difference."""

    a: str
    b: str
    whose: str
    """The possessive of `a`."""


_SIDES = Sides("rollout", "train", "the rollout's")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two versions of a parameter differ."""

    dim: int
    at: np.ndarray
    """The slices along `dim` that differ."""
    ranks: list[int]
    """The ranks that hold these slices; empty where one rank holds everything."""
    detail: str


class Sliced(Protocol):
    """A parameter by digests of its slices."""

    @property
    def name(self) -> str: ...
    @property
    def shards(self) -> Shards: ...
    @property
    def slices(self) -> tuple[np.ndarray, np.ndarray]: ...


def difference(a: Sliced, b: Sliced, sides: Sides, head_dim: int) -> Difference:
    """Compares two versions of one parameter, of one shape, slice by slice."""
    slices = [a.slices, b.slices]
    differ = [np.flatnonzero(x != y) for x, y in zip(*slices, strict=True)]
    # Permuted rows change every column, and the other way round: the permuted dimension counts, or
    # else the dimension in which the smaller share of slices differs.
    shares = [len(d) / max(1, len(x)) or 1.0 for d, x in zip(differ, slices[0], strict=True)]
    permuted = [_permuted(x, y) for x, y in zip(*slices, strict=True)]
    dim = permuted.index(True) if any(permuted) else shares.index(min(shares))
    at, mine, theirs = differ[dim], slices[0][dim], slices[1][dim]
    what = ("rows", "columns")[dim]
    ranks: list[int] = []
    owner = ""
    for side, parameter in ((sides.a, a), (sides.b, b)):
        holding = _holding(parameter.shards, dim, at)
        if holding:
            ranks, owner = holding, f"{side} {_ranks(holding)}: "
    if _permuted(mine, theirs):
        size = head_dim if _has_heads(a.name, dim) else 0
        return Difference(dim, at, ranks, owner + _moves(mine, theirs, what, size, sides))
    return Difference(dim, at, ranks, f"{owner}{what} {_ranges(at)} differ")


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A parameter of a trace."""

    trace: Trace
    name: str
    cast: str = ""
    """The dtype that the parameter is rounded to; empty where it is not rounded."""

    @property
    def shards(self) -> Shards:
        return self.trace.weights[self.name].shards

    @property
    def slices(self) -> tuple[np.ndarray, np.ndarray]:
        return self.trace.weight_slices(self.name, self.cast)


def _permuted(a: np.ndarray, b: np.ndarray) -> bool:
    return len(a) == len(b) > 0 and bool((a != b).any()) and np.array_equal(np.sort(a), np.sort(b))


def _holding(shards: Shards, dim: int, at: np.ndarray) -> list[int]:
    """Returns the ranks with a shard along `dim` that contains one of the slices `at`; none where
    rank 0 or every rank holds the whole parameter."""
    ranks = {
        rank
        for rank, d, start, stop in shards
        if d == dim and bool(((at >= start) & (at < stop)).any())
    }
    world = {rank for rank, *_ in shards}
    return sorted(ranks) if world - {0} else []


def _has_heads(name: str, dim: int) -> bool:
    """Whether the parameter has attention heads along `dim`."""
    operator = OPERATORS.get(name.removesuffix(".bias").rpartition(".")[2])
    counted = operator.weight[dim : dim + 1] if operator else ()
    return counted in (("query_heads",), ("kv_heads",))


def _moves(mine: np.ndarray, theirs: np.ndarray, what: str, head: int, sides: Sides) -> str:
    """Describes where the slices of one side are on the other, as runs."""
    place = {digest: i for i, digest in reversed(list(enumerate(mine.tolist())))}
    source = np.array([place[digest] for digest in theirs.tolist()])
    source = np.where(theirs == mine, np.arange(len(mine)), source)
    runs: list[Run] = []
    for offset, group in groupby(enumerate(source.tolist()), key=lambda p: p[1] - p[0]):
        members = [i for i, _ in group]
        if offset:
            runs.append((members[0], members[-1] + 1, members[0] + offset))
    if head and all(x % head == 0 for run in runs for x in run):
        runs = [(a // head, b // head, c // head) for a, b, c in runs]
        what = "heads"
    shown = [f"{_span(a, b)} hold {sides.whose} {_span(c, c + b - a)}" for a, b, c in runs[:_SHOWN]]
    more = f" and {len(runs) - _SHOWN} more runs" if len(runs) > _SHOWN else ""
    return f"{what} in another order: {sides.b}'s {', '.join(shown)}{more}"


def _ranges(at: np.ndarray) -> str:
    runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
    shown = [_span(int(r[0]), int(r[-1]) + 1) for r in runs[:_SHOWN]]
    more = f" and {len(runs) - _SHOWN} more runs" if len(runs) > _SHOWN else ""
    return ", ".join(shown) + more


def _span(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
