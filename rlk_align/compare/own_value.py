"""Finds rows whose attention equals their own value bit for bit although they attend to other
tokens: where a head gives nearly all its weight to the token itself, the others vanish in the
rounding."""

import numpy as np
import torch

from rlk_align.model.dtypes import DTYPES
from rlk_align.model.sites import RowIndex, first_attention
from rlk_align.trace.boundaries import alike
from rlk_align.trace.cached import cached_keys, cached_values
from rlk_align.trace.reader import Trace
from rlk_align.trace.values import RecordedRows

MOST_ROWS = 256
"""The most rows that are recomputed: each reads all tokens before it."""


def round_to_own_value(trace: Trace, name: str) -> bool:
    """Whether the rows of a pass that seem to attend to themselves alone would have the same bits
    if they attended to all tokens up to their own. Decided by the values that were kept; False
    where no such row was kept, and where the first row of a sequence attends to others."""
    index = RowIndex(trace.tokens)
    *_, value, attended = _sites(trace)
    rows = RecordedRows(trace.read_pass(name), index)
    kept = np.flatnonzero(rows.has_value(attended) & rows.has_value(value))
    if not len(kept):
        return False
    output = rows.values(attended, kept)
    cache, layer = trace.record.cache, trace.record.shape.first_attention
    cached = cached_values(cache, layer, rows.values(value, kept))
    own = _of_heads(trace, cached).reshape(output.shape)
    first = index.position[kept] == 0
    if not alike(output[first], own[first]).all():
        return False
    alone = (output == own).all(dim=1).numpy()
    suspects = kept[alone & ~first]
    known = [n for n in suspects.tolist() if _inputs_kept(trace, rows, index, n)]
    some = known[:: -(-len(known) // MOST_ROWS)] if known else []
    return bool(some) and all(_rounds(trace, rows, index, number) for number in some)


def _sites(trace: Trace) -> tuple[str, ...]:
    """The queries, keys and values that the first attention reads, and its output."""
    attention = first_attention(trace.record.shape)
    return (*attention.inputs, *attention.prefix_inputs, attention.name)


def _inputs_kept(trace: Trace, rows: RecordedRows, index: RowIndex, number: int) -> bool:
    first = number - int(index.position[number])
    sites = _sites(trace)[:-1]
    return all(rows.has_value(site)[first : number + 1].all() for site in sites)


def _rounds(trace: Trace, rows: RecordedRows, index: RowIndex, number: int) -> bool:
    """Whether attention over all tokens up to a row, in float64 on the recorded inputs, is within a
    unit in the last place of the row's own value."""
    seen = np.arange(number - int(index.position[number]), number + 1)
    query, key, value = (rows.values(site, seen).double() for site in _sites(trace)[:-1])
    q = query[-1].reshape(trace.record.shape.heads, -1)
    cache, layer = trace.record.cache, trace.record.shape.first_attention
    k = _of_heads(trace, cached_keys(cache, layer, key))
    v = _of_heads(trace, cached_values(cache, layer, value))
    weights = (torch.einsum("hd,nhd->hn", q, k) * _scale(trace, q.shape[1])).softmax(dim=-1)
    out, own = torch.einsum("hn,nhd->hd", weights, v), v[-1]
    ulp = 2.0 ** (1 - DTYPES[trace.record.dtype])
    return bool(((out - own).abs() <= ulp * own.abs()).all())


def _scale(trace: Trace, width: int) -> float:
    """The factor of q · k in the first attention, as the engine states it."""
    name, stated = "attention_scale", trace.record.attributes
    of_layer = f"layers.{first_attention(trace.record.shape).layer}.{name}"
    return float(stated.get(of_layer, stated.get(name)) or width**-0.5)


def _of_heads(trace: Trace, rows: torch.Tensor) -> torch.Tensor:
    """Repeats keys or values `[N, Hkv·D]` for the query heads that read them: `[N, H, D]`."""
    shape = trace.record.shape
    by_head = rows.reshape(len(rows), shape.kv_heads, -1)
    return by_head.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
