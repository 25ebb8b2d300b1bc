"""Attention under transformers' own interface, by the name `rlk`.

Padding, packing and a cache come down to one question here: which rows are sequences, and where
does each begin? B = sequences of the batch, T = queries, S = keys (of the cache too), H = heads,
D = size.
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.hf.sequences import (
    boundaries,
    check_rows,
    check_starts,
    real_first,
)
from rlk_kernels.integrations.operators import Counted

NAME = "rlk"


class Marked(Counted):
    """An attention module that reaches our core through the interface."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if self.config._attn_implementation != NAME:
            raise NotServed(
                f"attn_implementation={self.config._attn_implementation} was set after use_kernels"
            )
        if past_key_values is not None:
            check_cache(past_key_values)
        kwargs["rlk_cached"] = past_key_values is not None
        return super().forward(*args, past_key_values=past_key_values, **kwargs)


def check_cache(cache: Any) -> None:
    """Raises NotServed for a cache that does not return the keys and values that it was given."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(layer) for layer in cache.layers} if type(cache) is DynamicCache else {None}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        raise NotServed(
            f"a {type(cache).__name__} is not served (fixed sizes, quantised keys): use "
            "DynamicCache()"
        )


def register() -> None:
    """Register the name together with its mask: without a mask transformers ignores padding."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int, q_length: int, q_offset: int = 0, kv_offset: int = 0,
    attention_mask: Tensor | None = None, config: Any = None, **_unused: Any,
) -> Tensor | None:  # fmt: skip
    """bool [B, S]: which keys are real, not padding; [B, 0] if all are; None if not given."""
    if not getattr(config, "is_causal", True):
        raise NotServed("is_causal=False is not served: the kernels' attention is causal")
    if kv_offset:
        # The order of a sum is counted from a sequence's first key.
        raise NotServed(
            f"the cache has dropped {kv_offset} keys: caches cut to a window are not served; use "
            "DynamicCache() without the model's config"
        )
    if attention_mask is None:
        return None
    keys = q_offset + q_length
    if attention_mask.shape != (batch_size, keys):
        raise NotServed(
            f"an attention mask {list(attention_mask.shape)} is not served for {keys} keys of each "
            f"of {batch_size} sequences: one of {[batch_size, keys]} and a DynamicCache() are"
        )
    # A compiler traces without values.
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return attention_mask[:, :0]
    return attention_mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """out[B, T, H, D] of query[B, H, T, D], key and value[B, Hk, S, D]."""
    if not isinstance(module, Marked):
        raise NotServed(
            f"{type(module).__name__} has no kernels and shares its config with a model that has: "
            "give each model a config of its own"
        )
    module.count()
    _check(dropout, kwargs.get("is_causal", module.is_causal))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if attention_mask is not None:
        _check_mask(attention_mask, (q.shape[0], k.shape[1]))
    positions = kwargs.get("position_ids")
    whole = attention_mask is not None or kwargs["rlk_cached"]
    padded = attention_mask is not None and attention_mask.shape[1] > 0
    caller_cu = kwargs.get("cu_seq_lens_q")
    if caller_cu is not None and padded:
        raise NotServed("cu_seq_lens_q beside an attention mask with padding: give one of them")
    if module.layer_idx == 0 and caller_cu is not None:
        check_starts(positions, caller_cu, q.shape[0])
    elif module.layer_idx == 0 and whole:
        # Of all layers: the first may see all keys where others have a window.
        window = getattr(module.config, "sliding_window", None)
        check_rows(positions, attention_mask if padded else None, q.shape[1], window)
    if padded:
        return _padded(q, k, v, attention_mask, scale, sliding_window), None
    if caller_cu is not None:
        cu_q, cu_k = caller_cu, kwargs.get("cu_seq_lens_k", caller_cu)
    else:
        cu_q, cu_k = boundaries(q, k, None if whole else positions)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = profile.attention(*rows, cu_q, cu_k, scale, sliding_window)
    return out.unflatten(0, q.shape[:2]), None


def _check(dropout: float, causal: bool | None) -> None:
    if dropout:
        raise NotServed("dropout of attention is not served")
    if causal is False:
        raise NotServed("is_causal=False is not served: the kernels' attention is causal")


def _check_mask(padding: Any, shape: tuple[int, int]) -> None:
    """Raises NotServed for a mask that `mask` did not make."""
    known = isinstance(padding, Tensor) and padding.dtype == torch.bool and padding.dim() == 2
    if not known or padding.shape[0] != shape[0] or padding.shape[1] not in (0, shape[1]):
        size, dtype = (
            getattr(padding, "shape", ()),
            getattr(padding, "dtype", type(padding).__name__),
        )
        raise NotServed(
            f"an attention mask {list(size)} of {dtype}, made by the caller, is not served; one "
            f"of {list(shape)}, that says which keys are padding, is"
        )


def _padded(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float, window: int | None
) -> Tensor:
    """[B, T, H, D] of the same shape, by bool keys[B, S]; zeros for padding.

    Real rows are moved to the front, as sequences side by side, and padding to the end, outside
    every sequence: no shape depends on the values of the mask, so a compiler can trace it.
    """
    queries = keys[:, k.shape[1] - q.shape[1] :]
    order, order_k = real_first(queries), real_first(keys)
    rows = (
        x.flatten(0, 1).index_select(0, at) for x, at in ((q, order), (k, order_k), (v, order_k))
    )
    cu_q, cu_k = (profile.packed(real.sum(1)) for real in (queries, keys))
    out = profile.attention(*rows, cu_q, cu_k, scale, window)
    back = out.index_select(0, order.argsort()).unflatten(0, q.shape[:2])
    return back.masked_fill(~queries[:, :, None, None], 0.0)
