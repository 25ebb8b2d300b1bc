"""The portable gated delta rule: chunks of CHUNK rows, counted from the sequence's first token.

Products over features (q k, q S, k S) and the state's sum over a whole chunk are error-free
(`numerics/error_free.py`), so no order of additions changes their bits. Sums over the rows of an
open chunk go from front to back in float64, so a row's bits depend on the rows before it alone.

B = pieces of chunks, of different sequences   M = new rows of each   C = CHUNK   Hk, Hv = heads
D = features of q and k   E = features of v   T = rows of all sequences
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.error_free import matmul_nt
from rlk_kernels.numerics.rows import by_rows, tree_sum
from rlk_kernels.ops.delta_rule.chunk import CHUNK

MEMORY = 1 << 22
"""The most elements of states at a time: it bounds memory and changes no bit."""


def exp(x: Tensor) -> Tensor:
    return torch.exp(x) if x.dtype == torch.float64 else elementary.exp(x)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded by way of fp32. A zero is +0, because sums that skip terms of zero may differ in
    its sign."""
    return x.to(wide_dtype(dtype)).to(dtype) + 0.0


def normed(x: Tensor, eps: float, scale: float) -> Tensor:
    """x[T, H, D] * scale / sqrt(sum of squares + eps), rounded once."""

    def run(rows: Tensor) -> Tensor:
        wide = rows.double()
        return rounded(wide / (tree_sum(wide * wide) + eps).sqrt() * scale, x.dtype)

    return by_rows(run, x.reshape(-1, x.shape[-1])).view(x.shape)


class Rows(NamedTuple):
    """Rows of one length: q and k are normed."""

    q: Tensor
    """[B, M, Hk, D]."""
    k: Tensor
    v: Tensor
    """[B, M, Hv, E]."""
    g: Tensor
    """[B, M, Hv], fp32."""
    beta: Tensor
    """[B, M, Hv]."""


class Open(NamedTuple):
    """The rows of an open chunk, and the state at its beginning."""

    state: Tensor
    """[B, Hv, D, E], fp32."""
    keys: Tensor
    """[B, C, Hk, D]; from the chunk's last row on, zeros."""
    updates: Tensor
    """[B, C, Hv, E], u; likewise."""
    decays: Tensor
    """[B, C, Hv], fp32: G, the sum of g from the chunk's first row; likewise."""


class Products(NamedTuple):
    """What a chunk's rows are multiplied with, in float64 and by value head."""

    here: Tensor
    """exp(G) of the new rows, [B, Hv, M]."""
    below: Tensor
    """beta exp(G_i - G_j) k_i k_j for j < i, [B, Hv, M, C]; zeros for the other rows."""
    weights: Tensor
    """exp(G_i - G_j) q_i k_j for j <= i, rounded; likewise."""
    keys_state: Tensor
    """k S, [B, Hv, M, E]; S is the state, rounded."""
    queries_state: Tensor
    """q S, likewise."""


def by_value_head(x: Tensor, heads: int) -> Tensor:
    """[B, M, Hk or Hv, ...] -> [B, Hv, M, ...]: each head of q and k serves a group of heads of
    v."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)


def extend(rows: Rows, held: Tensor, old: Open) -> tuple[Open, Products]:
    """The chunk with the new rows' keys and decays, and its products. held[B]: the rows that the
    chunk has already; held + M is at most C."""
    batch, new, heads = rows.g.shape
    at = held[:, None] + torch.arange(new, device=held.device)
    each = torch.arange(batch, device=held.device)
    last = old.decays[each, (held - 1).clamp(min=0)]
    total = torch.where((held > 0)[:, None], last, 0.0)
    sums = []
    for i in range(new):
        total = total + rows.g[:, i]
        sums.append(total)
    decays, keys = old.decays.clone(), old.keys.clone()
    decays[each[:, None], at] = torch.stack(sums, 1)
    keys[each[:, None], at] = rows.k
    queries, new_keys, all_keys = (by_value_head(x, heads) for x in (rows.q, rows.k, keys))
    mine = torch.stack(sums, 2).double()  # [B, Hv, M]
    column = torch.arange(CHUNK, device=held.device)
    before = column < at[..., None]  # [B, M, C]
    decay = exp(mine[..., None] - decays.transpose(1, 2).double()[:, :, None])
    below = matmul_nt(new_keys, all_keys) * decay * by_value_head(rows.beta, heads)[..., None]
    weights = rounded(matmul_nt(queries, all_keys) * decay, rows.q.dtype).double()
    upto = (before | (column == at[..., None]))[:, None]
    state = rounded(old.state, rows.q.dtype).mT
    return Open(old.state, keys, old.updates, decays), Products(
        exp(mine),
        torch.where(before[:, None], below, 0.0),
        torch.where(upto, weights, 0.0),
        matmul_nt(new_keys, state),
        matmul_nt(queries, state),
    )


def advance(rows: Rows, held: Tensor, old: Open) -> tuple[Tensor, Open]:
    """(out[B, M, Hv, E] rounded, the chunk with the new rows); a chunk that became full is as it
    was before it moved the state (`moved`)."""
    chunk, p = extend(rows, held, old)
    new, dtype = rows.g.shape[1], rows.v.dtype
    beta, v = (by_value_head(x.double(), x.shape[2]) for x in (rows.beta, rows.v))
    u = beta[..., None] * (v - p.here[..., None] * p.keys_state)
    out = p.here[..., None] * p.queries_state
    first = held[:, None, None, None]
    for j in range(int(held.max())):
        use = j < first
        term = old.updates[:, j].double()[:, :, None]
        u = torch.where(use, u - p.below[..., j, None] * term, u)
        out = torch.where(use, out + p.weights[..., j, None] * term, out)
    at = held[:, None] + torch.arange(new, device=held.device)
    every = at[:, None, None].expand(-1, *p.below.shape[1:3], -1)
    below, weights = p.below.gather(3, every), p.weights.gather(3, every)  # [B, Hv, M, M]
    updates = []
    for i in range(new):
        mine = rounded(u[:, :, i], dtype)
        updates.append(mine)
        term = mine.double()[:, :, None]
        u[:, :, i + 1 :] -= below[:, :, i + 1 :, i, None] * term
        out[:, :, i:] += weights[:, :, i:, i, None] * term
    kept = old.updates.clone()
    each = torch.arange(len(held), device=held.device)
    kept[each[:, None], at] = torch.stack(updates, 1)
    return rounded(out, dtype).transpose(1, 2), chunk._replace(updates=kept)


def moved(chunk: Open) -> Tensor:
    """The state [B, Hv, D, E] after a full chunk: exp(G) S + sum_j k_j round(exp(G - G_j) u_j) with
    the chunk's last G, in float64, rounded to fp32."""
    heads = chunk.decays.shape[2]
    decays = chunk.decays.transpose(1, 2).double()
    last = decays[..., -1:]
    later = exp(last - decays)
    updates = chunk.updates.transpose(1, 2).double() * later[..., None]
    keys = by_value_head(chunk.keys, heads).mT
    added = matmul_nt(keys.contiguous(), rounded(updates, chunk.updates.dtype).mT.contiguous())
    return (exp(last)[..., None] * chunk.state.double() + added).to(chunk.state.dtype)


class Cache(NamedTuple):
    """What sequences keep, by slot."""

    state: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    def read(self, slots: Tensor, context: Tensor) -> Open:
        """The open chunks of slots[B] after context[B] tokens. What is not theirs is not read: a
        new sequence has a state of zeros, a new chunk no rows."""
        held = (context % CHUNK)[:, None, None, None]
        is_held = torch.arange(CHUNK, device=slots.device)[None, :, None, None] < held
        old = context[:, None, None, None] >= CHUNK
        return Open(
            torch.where(old, self.state[slots], 0.0),
            torch.where(is_held, self.keys[slots], 0.0),
            torch.where(is_held, self.updates[slots], 0.0),
            torch.where(is_held[..., 0], self.decays[slots], 0.0),
        )

    def write(self, slots: Tensor, at: Tensor, chunk: Open) -> None:
        """Writes the rows at[B, M] of chunks, and the states of chunks whose row C - 1 is among
        them."""
        each = torch.arange(len(slots), device=slots.device)[:, None]
        self.keys[slots[:, None], at] = chunk.keys[each, at]
        self.updates[slots[:, None], at] = chunk.updates[each, at]
        self.decays[slots[:, None], at] = chunk.decays[each, at]
        full = at[:, -1] == CHUNK - 1
        if bool(full.any()):
            self.state[slots[full]] = moved(Open(*(x[full] for x in chunk)))


@dataclass(slots=True)
class Piece:
    """Rows of one sequence that are in one chunk."""

    sequence: int
    first: int
    """The first of its rows among T."""
    new: int
    context: int
    """The tokens of the sequence before it."""


def pieces(bounds: list[int], contexts: list[int]) -> list[list[Piece]]:
    """The pieces of all sequences, in rounds: a sequence has one piece in a round, and its next
    piece in the next one."""
    rounds: list[list[Piece]] = []
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        first, context, number = begin, contexts[sequence], 0
        while first < end:
            new = min(CHUNK - context % CHUNK, end - first)
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(Piece(sequence, first, new, context))
            first, context, number = first + new, context + new, number + 1
    return rounds


def _together(one_round: list[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces of one length, at most `most` at a time."""
    by_length: dict[int, list[Piece]] = {}
    for piece in one_round:
        by_length.setdefault(piece.new, []).append(piece)
    for same in by_length.values():
        yield from (same[i : i + most] for i in range(0, len(same), most))


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: Cache, slots: Tensor,
    contexts: list[int], bounds: list[int], scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """out[T, Hv, E]; the cache goes on. Rows outside every sequence are 0."""
    q, k = normed(q, eps, scale), normed(k, eps, 1.0)
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    most = max(1, MEMORY // max(1, cache.state[:1].numel(), CHUNK * v[:1].numel()))
    for one_round in pieces(bounds, contexts):
        for some in _together(one_round, most):
            span = torch.arange(some[0].new, device=v.device)
            rows = torch.tensor([p.first for p in some], device=v.device)[:, None] + span
            context = torch.tensor([p.context for p in some], device=v.device)
            held = context % CHUNK
            mine = slots[torch.tensor([p.sequence for p in some], device=v.device)]
            new = Rows(q[rows], k[rows], v[rows], g[rows], beta[rows])
            out[rows], chunk = advance(new, held, cache.read(mine, context))
            cache.write(mine, held[:, None] + span, chunk)
    return out
