"""The portable attention: exact products, where a row depends on its own keys alone.

    score[j] = scale * (q . k[j])                    exact dot, rounded to fp32
               softcap tanh( scale (q . k[j]) / softcap ) with a softcap, rounded again
    p[j]     = exp(score[j] - max score)             float64, on a grid of 2**-P_BITS
    out      = ( sum over chunks, front to back, of sum_{j in chunk} p[j] v[j] ) / sum_j p[j]
    lse      = max score + log( sum_j p[j] )

The sums inside a chunk of CHUNK keys (aligned to key 0) and the sum of p are error-free
(`numerics/error_free.py`), so only the order of chunks matters, which depends on the index of the
key. The values of a key have their own grid, never one for a block of keys, so that a key that a
row does not see cannot change its bits. So sequences may be padded and batched freely, which keeps
this fast.

B = sequences   T = queries (padded)   S = keys (padded)   G = query heads of a KV head   D = size
R = T * G packed rows
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.error_free import exponent_of, matmul_nt, pow2
from rlk_kernels.numerics.rows import tree_sum

CHUNK = 256
P_BITS = 30
"""The bits of a weight p: the float64 sum of up to 2^22 of them is exact."""
LEAST = -900
"""The grid of a chunk whose weights are all below 2**LEAST, because `pow2` ends at 2**1023."""
MEMORY = 1 << 16
"""The most scores at a time: it bounds memory and changes no bit."""


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    """sum_j p[..., R, j] v[..., j, D] in float64, exact in a chunk, with chunks from front to back.

    The values of a key are on the key's own grid 2**e[j]; e[j] moves into p, whose grid belongs to
    the row. Both have two slices.
    """
    if v.dtype == torch.float64:
        return p @ v
    out = p.new_zeros(*p.shape[:-1], v.shape[-1])
    for start in range(0, p.shape[-1], CHUNK):
        here = slice(start, start + CHUNK)
        out += _weighted_chunk(p[..., here], v[..., here, :])
    return out


def _weighted_chunk(p: Tensor, v: Tensor) -> Tensor:
    width = (52 - math.ceil(math.log2(CHUNK))) // 2
    exponent = exponent_of(v)
    p = p * pow2(exponent).mT
    top = exponent_of(p).clamp(min=LEAST)
    p.mul_(pow2(width - top))
    p_high = p.round()
    p_low = p.sub_(p_high).mul_(2.0**width).round_()
    v = v.double().mul_(pow2(width - exponent))
    v_high = v.round()
    v_low = v.sub_(v_high)
    low = p_low @ v_high
    if bool((v_low != 0).any()):  # otherwise only exact zeros would be added
        low += p_high @ v_low.mul_(2.0**width).round_()
    return low.mul_(2.0**-width).add_(p_high @ v_high).mul_(pow2(top - 2 * width))


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    wide = wide_dtype(q.dtype)
    score = (matmul_nt(q, k).to(wide) * scale).double()
    if softcap:
        t = _exp(score.abs() * (-2.0 / softcap), q.dtype)
        score = (torch.where(score < 0, -softcap, softcap) * ((1 - t) / (1 + t))).to(wide).double()
    return torch.where(visible, score, -math.inf)


def _exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.exp(x) if dtype == torch.float64 else elementary.exp(x)


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """out[..., R, D], lse[..., R] of q[..., R, D], k and v[..., S, D], visible[..., R, S]."""
    wide = wide_dtype(q.dtype)
    score = _scores(q, k, visible, scale, softcap)
    top = score.amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    p = torch.where(visible, _exp(score - top, q.dtype), 0.0)
    if wide == torch.float32:
        p = (p * 2.0**P_BITS).round_().mul_(2.0**-P_BITS)
    total = p.sum(-1, keepdim=True)  # integers on one grid: exact
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    out = torch.where(empty, 0.0, weighted_sum(p, v) / safe)
    log_total = torch.log(safe) if wide == torch.float64 else elementary.log(safe)
    lse = torch.where(empty, -math.inf, top + log_total).squeeze(-1)
    return out.to(wide), lse.to(wide)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float64, with the shapes of q, k, v."""
    lse = torch.where(lse == -math.inf, 0.0, lse.double())
    score = _scores(q, k, visible, scale, softcap)
    p = torch.where(visible, _exp(score - lse[..., None], q.dtype), 0.0)
    delta = tree_sum(out.double() * do.double())
    narrow = wide_dtype(q.dtype)
    ds = p * (matmul_nt(do, v) - delta) * scale
    if softcap:
        ds = torch.where(visible, ds * (1.0 - (score / softcap).square()), 0.0)
    dq = weighted_sum(ds, k)
    dk = matmul_nt(ds.to(narrow).mT, q.mT)
    dv = matmul_nt(p.to(narrow).mT, do.mT)
    return dq, dk, dv


@dataclass(slots=True)
class Batch:
    """Some padded sequences: the indices of their rows and keys, and the keys that a row sees."""

    rows: Tensor
    """[B, T] token of each query; padding repeats the last."""
    keys: Tensor
    """[B, S] flat key slot; padding repeats the last."""
    row_live: Tensor
    key_live: Tensor
    visible: Tensor
    """[B, 1, T * G, S]"""


def batches(
    cu_q: Tensor, start_k: list[int], len_k: list[int], table: Tensor | None, page: int,
    group: int, kv_heads: int, causal: bool, window: int | None,
) -> Iterator[Batch]:  # fmt: skip
    """Divide the sequences into padded batches of at most MEMORY scores, with at least one
    sequence, or as many of its queries as fit."""
    bounds = cu_q.tolist()
    spans = []  # (sequence, first query, last query + 1)
    for b, (begin, end) in enumerate(pairwise(bounds)):
        step = max(1, MEMORY // max(1, len_k[b] * group * kv_heads))
        spans += [(b, t, min(t + step, end - begin)) for t in range(0, end - begin, step)]
    device = cu_q.device
    pending: list[tuple[int, int, int]] = []
    for span in [*spans, None]:
        trial = [*pending, span] if span else pending
        cost = len(trial) * group * kv_heads
        cost *= max((e - s for _, s, e in trial), default=0)
        cost *= max((len_k[b] for b, _, _ in trial), default=0)
        if span and (cost <= MEMORY or not pending):
            pending = trial
            continue
        if pending:
            yield _pad(pending, bounds, start_k, len_k, table, page, group, causal, window, device)
        pending = [span] if span else []
    if pending:
        yield _pad(pending, bounds, start_k, len_k, table, page, group, causal, window, device)


def _pad(spans, bounds, start_k, len_k, table, page, group, causal, window, device) -> Batch:
    def column(values):
        return torch.tensor(values, device=device, dtype=torch.int64)[:, None]

    b = column([p[0] for p in spans])
    first, end = column([p[1] for p in spans]), column([p[2] for p in spans])
    begin, keys = column([bounds[p[0]] for p in spans]), column([len_k[p[0]] for p in spans])
    queries = column([bounds[p[0] + 1] - bounds[p[0]] for p in spans])
    t = first + torch.arange(int((end - first).max()), device=device)
    s = torch.arange(max(1, int(keys.max())), device=device)[None, :]
    row_live, key_live = t < end, s < keys
    t = torch.minimum(t, end - 1)
    slot = torch.minimum(s, (keys - 1).clamp(min=0))
    if table is None:
        slot = slot + column([start_k[p[0]] for p in spans])
    else:
        slot = table[b.expand_as(slot), slot // page].long() * page + slot % page
    last = (t + keys - queries) if causal else (keys - 1).expand_as(t)
    visible = (s[:, None, :] <= last[:, :, None]) & key_live[:, None, :] & row_live[:, :, None]
    if window is not None:
        visible &= s[:, None, :] > last[:, :, None] - window
    visible = visible.repeat_interleave(group, dim=1)[:, None]
    return Batch(begin + t, slot, row_live, key_live, visible)


def pack_rows(x: Tensor, rows: Tensor, kv_heads: int) -> Tensor:
    """x[tokens, Hq, D] -> [B, Hk, T * G, D]."""
    b, t = rows.shape
    x = x[rows].view(b, t, kv_heads, -1, x.shape[-1])
    return x.permute(0, 2, 1, 3, 4).reshape(b, kv_heads, -1, x.shape[-1])


def unpack_rows(x: Tensor, rows: Tensor, live: Tensor, out: Tensor) -> None:
    """The inverse of `pack_rows`: write the live rows of x[B, Hk, T * G, D] into out."""
    b, t = rows.shape
    kv_heads = x.shape[1]
    x = x.view(b, kv_heads, t, -1, x.shape[-1]).permute(0, 2, 1, 3, 4)
    out[rows[live]] = x.reshape(b, t, -1, x.shape[-1])[live].to(out.dtype)


def pack_keys(x: Tensor, keys: Tensor) -> Tensor:
    """x[slots, Hk, D] -> [B, Hk, S, D]; zeros without any slots."""
    if x.shape[0] == 0:
        return x.new_zeros(keys.shape[0], x.shape[1], keys.shape[1], x.shape[2])
    return x[keys.clamp(max=x.shape[0] - 1)].transpose(1, 2)


def _check_bounds(
    tokens: int, slots: int, cu_q: Tensor, start_k: list[int], len_k: list[int],
    table: Tensor | None, page: int,
) -> None:  # fmt: skip
    """Raise UnsupportedShape if sequences reach beyond q, k, v or the cache."""
    bounds = cu_q.tolist()
    if not bounds or bounds[0] < 0 or bounds[-1] > tokens or sorted(bounds) != bounds:
        raise UnsupportedShape(
            f"attention: cu_seqlens of the queries, {bounds}, must rise from 0 to at most {tokens}"
        )
    if any(n < 0 for n in len_k):
        raise UnsupportedShape(f"attention: the numbers of keys, {len_k}, must not be negative")
    if table is None:
        if any(a < 0 or a + n > slots for a, n in zip(start_k, len_k, strict=True)):
            raise UnsupportedShape(
                f"attention: sequences that start at keys {start_k} and have {len_k} keys reach "
                f"beyond k, which has {slots}"
            )
        return
    for row, n in zip(table.tolist(), len_k, strict=True):
        used = row[: -(-n // page)]
        if len(used) * page < n or any(not 0 <= block < slots // page for block in used):
            raise UnsupportedShape(
                f"paged_attention: {n} keys need {-(-n // page)} of {slots // page} blocks, and "
                f"the table has {used}"
            )


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, start_k: list[int], len_k: list[int],
    table: Tensor | None, page: int, causal: bool, scale: float, window: int | None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out[T, Hq, E], lse[Hq, T]); k[slots, Hk, D], v[slots, Hk, E]."""
    _check_bounds(q.shape[0], k.shape[0], cu_q, start_k, len_k, table, page)
    if table is not None and table.shape[1] == 0:  # no sequence has keys
        table = table.new_zeros(table.shape[0], 1)
    wide = wide_dtype(q.dtype)
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.full((*q.shape[:2], 1), -math.inf, dtype=wide, device=q.device)
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    for batch in batches(cu_q, start_k, len_k, table, page, group, kv_heads, causal, window):
        o, part = attend(
            pack_rows(q, batch.rows, kv_heads), pack_keys(k, batch.keys),
            pack_keys(v, batch.keys), batch.visible, scale, softcap,
        )  # fmt: skip
        unpack_rows(o, batch.rows, batch.row_live, out)
        unpack_rows(part[..., None], batch.rows, batch.row_live, lse)
    return out, lse.squeeze(-1).T.contiguous()


def backward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, start_k: list[int], len_k: list[int],
    causal: bool, scale: float, window: int | None, out: Tensor, lse: Tensor, do: Tensor,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) in the inputs' dtypes."""
    dq, *both = gradients(
        q, k, v, cu_q, start_k, len_k, causal, scale, window, out, lse, do, softcap
    )
    wide = wide_dtype(q.dtype)
    dk, dv = (x.to(wide).to(k.dtype) for x in both)
    return dq, dk, dv


def gradients(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, start_k: list[int], len_k: list[int],
    causal: bool, scale: float, window: int | None, out: Tensor, lse: Tensor, do: Tensor,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq in q's dtype, dk and dv in float64); batches of queries are added to dk and dv in
    order."""
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (k, v))
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    for batch in batches(cu_q, start_k, len_k, None, 1, group, kv_heads, causal, window):
        packed = [pack_rows(x, batch.rows, kv_heads) for x in (q, out, do, lse.T[..., None])]
        live = batch.row_live.repeat_interleave(group, dim=1)[:, None, :, None]
        grads = attend_backward(
            packed[0], pack_keys(k, batch.keys), pack_keys(v, batch.keys), batch.visible, scale,
            packed[1], packed[3].squeeze(-1), torch.where(live, packed[2], 0.0), softcap,
        )  # fmt: skip
        unpack_rows(grads[0], batch.rows, batch.row_live, dq)
        for total, part in zip((dk, dv), grads[1:], strict=True):
            for b in range(batch.keys.shape[0]):  # a sequence may be in several spans
                n = int(batch.key_live[b].sum())
                total[batch.keys[b, :n]] += part[b, :, :n].transpose(0, 1)
    return dq, dk, dv
