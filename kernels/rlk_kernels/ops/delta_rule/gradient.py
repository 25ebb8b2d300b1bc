"""The gradient of the portable gated delta rule: a sequence at a time, its chunks from the last.

The states at the beginnings of chunks and the updates u are recomputed by the forward's own code.
With the lower triangular A[i, j] = beta_i exp(G_i - G_j) k_i k_j and P[i, j] = exp(G_i - G_j) q_i
k_j, l_j = exp(G_last - G_j), and dS the gradient of the state after the chunk:

    du = P^T do + l (k dS)                    dr = (I + A)^-T du, from the last row to the first
    dA = -dr u^T (j < i)    dP = do u^T (j <= i)    dv = beta dr
    dq = (dP e) k + exp(G) (do S^T)
    dk = (dP e)^T q + (dA e beta) k + (dA e beta)^T k - exp(G) (dv S^T) + l (u dS^T)
    dS before = exp(G_last) dS + (exp(G) q)^T do - (exp(G) k)^T dv

with e[i, j] = exp(G_i - G_j). Roundings are treated as the identity. Products are error-free, of
operands rounded to fp32; other sums are by halves, in float64.

N = rows of a chunk   Hk, Hv = heads   D = features of q and k   E = features of v
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.error_free import matmul_nt
from rlk_kernels.numerics.rows import tree_sum
from rlk_kernels.ops.delta_rule import portable
from rlk_kernels.ops.delta_rule.chunk import CHUNK
from rlk_kernels.ops.delta_rule.portable import Open, Products, Rows, by_value_head, exp


class _Chunk(NamedTuple):
    """A chunk of the forward: its rows, and the chunk with u as `portable.advance` made it."""

    rows: Rows
    done: Open
    products: Products


class _Grads(NamedTuple):
    """Gradients of a chunk's rows, by value head, in float64: [Hv, N, ...]; dq and dk are those of
    the normed rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a[..., M, K] @ b[..., N, K]^T."""
    return matmul_nt(a.to(wide).contiguous(), b.to(wide).contiguous())


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension, by halves."""
    return tree_sum(x).squeeze(-1)


def _transposed_solve(below: Tensor, du: Tensor) -> Tensor:
    """dr with (I + below)^T dr = du, for below[Hv, N, N] strictly lower triangular."""
    dr = du.clone()
    for i in range(dr.shape[1] - 1, 0, -1):
        dr[:, :i] -= below[:, i, :i, None] * dr[:, i, None]
    return dr


def _later_sums(x: Tensor) -> Tensor:
    """The sum from each row to the last: [Hv, N]."""
    total = x.clone()
    for i in range(x.shape[1] - 2, -1, -1):
        total[:, i] += total[:, i + 1]
    return total


def _chunk_gradient(chunk: _Chunk, do: Tensor, ds: Tensor, wide: torch.dtype) -> tuple:
    """(`_Grads`, the gradient of the state at the chunk's beginning) of do[Hv, N, E] and the
    gradient ds[Hv, D, E] of the state after the chunk."""
    rows, done, p = chunk
    n, heads = rows.g.shape[1:]
    q, k, v, beta = (
        by_value_head(x, heads)[0].double() for x in (rows.q, rows.k, rows.v, rows.beta)
    )
    u = done.updates[0, :n].transpose(0, 1).double()
    state = portable.rounded(done.state, rows.q.dtype)[0].double()
    sums = done.decays[0, :n].T.double()  # [Hv, N]
    here, later = p.here[0][..., None], exp(sums[:, -1:] - sums)[..., None]
    mask = torch.ones(n, n, dtype=torch.bool, device=do.device)
    decay = torch.where(mask.tril(), exp(sums[..., None] - sums[:, None]), 0.0)
    below, weights = p.below[0, ..., :n], p.weights[0, ..., :n]

    du = _product(weights.mT, do.mT, wide) + later * _product(k, ds.mT, wide)
    dr = _transposed_solve(below, du)
    d_below = torch.where(mask.tril(-1), -_product(dr, u, wide), 0.0)
    d_weights = torch.where(mask.tril(), _product(do, u, wide), 0.0)
    dx = dr * beta[..., None]
    u_ds, dx_s, do_s = (_product(*pair, wide) for pair in ((u, ds), (dx, state), (do, state)))
    d_qk = d_weights * decay
    d_kk = d_below * decay * beta[..., None]
    dq = _product(d_qk, k.mT, wide) + here * do_s
    dk = _product(d_qk.mT, q.mT, wide) + _product(d_kk, k.mT, wide)
    dk = dk + _product(d_kk.mT, k.mT, wide) - here * dx_s + later * u_ds
    kk = torch.where(mask.tril(-1), _product(k, k, wide), 0.0)
    left = v - here * p.keys_state[0]
    d_beta = _sum(d_below * kk * decay) + _sum(dr * left)
    both = d_weights * weights + d_below * below
    dg = _sum(both) - _sum(both.mT)
    dg = dg + here[..., 0] * (_sum(do * p.queries_state[0]) - _sum(dx * p.keys_state[0]))
    moves = later[..., 0] * _sum(k * u_ds)
    dg = dg - moves
    end = exp(sums[:, -1])
    dg[:, -1] += _sum(moves) + end * _sum((ds * state).flatten(1))
    ds = end[:, None, None] * ds + _product((here * q).mT, do.mT, wide)
    ds = ds - _product((here * k).mT, dx.mT, wide)
    return _Grads(dq, dk, dx, _later_sums(dg), d_beta), ds


def _chunks(rows: Rows, wide: torch.dtype) -> list[_Chunk]:
    """The chunks of one sequence, whose rows are [1, N, ...]."""
    (_, total, hk, d), (hv, e), device = rows.k.shape, rows.v.shape[2:], rows.v.device
    state, chunks = torch.zeros(1, hv, d, e, dtype=wide, device=device), []
    none = torch.zeros(1, dtype=torch.int64, device=device)
    for first in range(0, total, CHUNK):
        mine = Rows(*(x[:, first : first + CHUNK] for x in rows))
        empty = Open(
            state,
            rows.k.new_zeros(1, CHUNK, hk, d),
            rows.v.new_zeros(1, CHUNK, hv, e),
            torch.zeros(1, CHUNK, hv, dtype=wide, device=device),
        )
        _, products = portable.extend(mine, none, empty)
        _, done = portable.advance(mine, none, empty)
        chunks.append(_Chunk(mine, done, products))
        if first + CHUNK <= total:
            state = portable.moved(done)
    return chunks


def _sequence_gradient(rows: Rows, do: Tensor, wide: torch.dtype) -> list[Tensor]:
    """The gradients of one sequence, [N, H, ...] in float64."""
    chunks = _chunks(rows, wide)
    (hk, d), (hv, e) = rows.k.shape[2:], rows.v.shape[2:]
    ds = torch.zeros(hv, d, e, dtype=torch.float64, device=do.device)
    found: list[_Grads] = []
    for number in range(len(chunks) - 1, -1, -1):
        mine = do[number * CHUNK : (number + 1) * CHUNK].double().transpose(0, 1)
        grads, ds = _chunk_gradient(chunks[number], mine, ds, wide)
        found.append(grads)
    dq, dk, *rest = (torch.cat(part, 1).transpose(0, 1) for part in zip(*found[::-1], strict=True))
    return [*(_sum(x.unflatten(1, (hk, hv // hk)).transpose(2, 3)) for x in (dq, dk)), *rest]


def _through_norm(x: Tensor, d: Tensor, eps: float, scale: float) -> Tensor:
    """The gradient of x[T, H, D], of d, that of x * scale / sqrt(sum of squares + eps)."""
    wide, d = x.double(), d * scale
    inverse = 1.0 / (tree_sum(wide * wide) + eps).sqrt()
    return inverse * d - inverse * inverse * inverse * wide * tree_sum(d * wide)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: list[int], scale: float,
    eps: float, do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta) in the inputs' dtypes; rows outside every sequence have zeros."""
    wide = wide_dtype(q.dtype)
    rows = Rows(portable.normed(q, eps, scale), portable.normed(k, eps, 1.0), v, g, beta)
    inputs = (q, k, v, g, beta)
    grads = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in inputs]
    for begin, end in pairwise(bounds):
        if begin < end:
            mine = Rows(*(x[None, begin:end] for x in rows))
            found = _sequence_gradient(mine, do[begin:end], wide)
            for grad, part in zip(grads, found, strict=True):
                grad[begin:end] = part
    grads[0], grads[1] = (
        _through_norm(q, grads[0], eps, scale),
        _through_norm(k, grads[1], eps, 1.0),
    )
    dq, dk, dv, dg, dbeta = (d.to(wide).to(x.dtype) for d, x in zip(grads, inputs, strict=True))
    return dq, dk, dv, dg, dbeta
