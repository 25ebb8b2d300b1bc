"""Rows whose attention may be their own value to the bit, although they see other tokens: where a
head gives nearly all its weight to the token itself, rounding leaves nothing of the others."""

import numpy as np
import torch

from rlk_align.model.dtypes import DTYPES
from rlk_align.model.sites import RowIndex
from rlk_align.trace.reader import Trace
from rlk_align.trace.values import RecordedRows

INPUTS = ("layers.0.q_rope", "layers.0.k_rope", "layers.0.v_proj")


def rounds_to_own_value(trace: Trace, name: str, sample: int, position: int) -> bool:
    """Whether attention over all tokens up to a position, in float64 on what the pass recorded, is
    within a unit in the last place of the token's own value; False where values were not kept."""
    index = RowIndex(trace.tokens)
    rows = RecordedRows(trace.read_pass(name), index)
    first = int(index.offsets[sample])
    number = np.arange(first, first + position + 1)
    if not all(rows.has_value(site)[number].all() for site in INPUTS):
        return False
    query, key, value = (rows.values(site, number).double() for site in INPUTS)
    shape = trace.record.shape
    group = shape.heads // shape.kv_heads
    q = query[-1].reshape(shape.heads, -1)
    k, v = (
        t.reshape(len(number), shape.kv_heads, -1).repeat_interleave(group, dim=1)
        for t in (key, value)
    )
    weights = (torch.einsum("hd,nhd->hn", q, k) / q.shape[1] ** 0.5).softmax(dim=-1)
    out, own = torch.einsum("hn,nhd->hd", weights, v), v[-1]
    ulp = 2.0 ** (1 - DTYPES[trace.record.dtype])
    return bool(((out - own).abs() <= ulp * own.abs()).all())
