"""Attention under transformers' own interface, by the name `rlk`.

Padding, packing and a cache are all one thing here: which rows are sequences, and where each
begins. B = sequences of the batch, T = queries, S = keys (of the cache too), H = heads, D = size.
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.operators import Counted

NAME = "rlk"


class Marked(Counted):
    """An attention module whose core is ours; it reaches it through the interface."""


def register() -> None:
    """Make the name known, together with its mask: without one transformers drops padding."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None,
    **_unused: Any,
) -> Tensor | None:  # fmt: skip
    """bool [B, S]: which keys are no padding; None where none is."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.shape[1] != kv_length:
        raise NotServed(
            f"{kv_length} keys and a mask of {attention_mask.shape[1]}: caches of fixed size and "
            "caches cut to a window are not served; use DynamicCache()"
        )
    return attention_mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """out[B, T, H, D] of query[B, H, T, D], key and value[B, Hk, S, D]."""
    module.count()
    if dropout:
        raise NotServed("dropout of attention is not served")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    batch, length, seen = q.shape[0], q.shape[1], k.shape[1]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    positions = kwargs.get("position_ids")
    _check_whole(positions, attention_mask, seen, sliding_window)
    if attention_mask is not None:
        queries = attention_mask[:, seen - length :]
        cu_q, cu_k = (profile.packed(m.sum(1)) for m in (queries, attention_mask))
        out = torch.zeros_like(q)
        rows = (q[queries], k[attention_mask], v[attention_mask])
        out[queries] = profile.attention(*rows, cu_q, cu_k, scale, sliding_window)
        return out, None
    cu_q, cu_k = _boundaries(batch, length, seen, positions, q.device, kwargs)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    found = profile.attention(*rows, cu_q, cu_k, scale, sliding_window)
    return found.unflatten(0, (batch, length)), None


def _boundaries(
    batch: int, length: int, seen: int, positions: Tensor | None, device: torch.device,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Where sequences begin, among the queries and among the keys: as the caller says, or where
    positions start anew."""
    if given.get("cu_seq_lens_q") is not None:
        return given["cu_seq_lens_q"], given["cu_seq_lens_k"]
    if positions is not None and length == seen > 1:
        first = positions.expand(batch, length).clone()
        first[:, 1:] -= positions[:, :-1] + 1
        first[:, 0] = -1
        starts = first.flatten().nonzero().squeeze(1)
        cu = torch.nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)
        return cu, cu
    cu_q, cu_k = (
        torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=device)
        for n in (length, seen)
    )
    return cu_q, cu_k


def _check_whole(
    positions: Tensor | None, attention_mask: Tensor | None, seen: int, window: int | None
) -> None:
    """Raises NotServed where a cache has dropped the keys before the window: the order of a sum is
    counted from a sequence's first key."""
    if window is None or positions is None or attention_mask is not None:
        return
    last = int(positions.max())
    if last >= seen:
        raise NotServed(
            f"the cache holds {seen} keys of {last + 1}: caches cut to a window are not served; "
            "use DynamicCache() without the model's config"
        )
