"""Attention in transformers' own interface, under the name `rlk`.

Padding, packing and a cache are all described by the rows at which sequences begin. B = sequences
of the batch, T = queries, S = keys (those in the cache included), H = heads, D = size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.hf.sequences import (
    boundaries,
    check_rows,
    check_starts,
    real_first,
)
from rlk_kernels.integrations.operators import Counted

NAME = "rlk"


class AttentionModule(Counted):
    """An attention module that calls `attend` through the interface."""

    def rlk_check(self, past_key_values: Any) -> None:
        """Raises NotSupported for another attention, or an unsupported cache."""
        if self.config._attn_implementation != NAME:
            raise NotSupported(
                f"attn_implementation={self.config._attn_implementation} was set after use_kernels"
            )
        if past_key_values is not None:
            check_cache(past_key_values)

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        self.rlk_check(past_key_values)
        kwargs["rlk_cached"] = past_key_values is not None
        return super().forward(*args, past_key_values=past_key_values, **kwargs)


class TemperedAttention(AttentionModule):
    """Attention whose queries are multiplied by a factor of their position."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        # At position 0 transformers' own factor is 1. Ours is in `attend`.
        positions = kwargs["position_ids"]
        kwargs |= {"rlk_positions": positions, "position_ids": torch.zeros_like(positions)}
        return super().forward(*args, past_key_values=past_key_values, **kwargs)

    def tempered(self, query: Tensor, positions: Tensor) -> Tensor:
        """query[B, H, T, D] times the factors at positions[B or 1, T]."""
        beta, context = profile.temperature_of(self.config.rope_parameters)
        scale = profile.query_scale(positions, beta, context, query.dtype)
        return query * scale[:, None, :, None]


def check_cache(cache: Any) -> None:
    """Raises NotSupported for a cache that does not return keys and values unchanged."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(layer) for layer in cache.layers} if type(cache) is DynamicCache else {None}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        raise NotSupported(
            f"a {type(cache).__name__} is not supported, because it pads or quantises keys: use "
            "DynamicCache()"
        )


def register() -> None:
    """Registers the attention and its mask. Without a mask, transformers ignores padding."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int, q_length: int, q_offset: int = 0, kv_offset: int = 0,
    attention_mask: Tensor | None = None, config: Any = None, **_unused: Any,
) -> Tensor | None:  # fmt: skip
    """bool [B, S]: True for real keys, False for padding; [B, 0] if all keys are real; None without
    a mask."""
    if not getattr(config, "is_causal", True):
        raise NotSupported("is_causal=False is not supported: the kernels' attention is causal")
    if kv_offset:
        # The order of a sum begins at the first key of a sequence.
        raise NotSupported(
            f"the cache has dropped {kv_offset} keys: a cache that keeps only a window is not "
            "supported; use DynamicCache() without the model's config"
        )
    if attention_mask is None:
        return None
    keys = q_offset + q_length
    if attention_mask.shape != (batch_size, keys):
        raise NotSupported(
            f"an attention mask {list(attention_mask.shape)} is not supported for {keys} keys in "
            f"each of {batch_size} sequences: pass a mask {[batch_size, keys]} and a DynamicCache()"
        )
    # A compiler traces the mask without its values.
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return attention_mask[:, :0]
    return attention_mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """(out[B, T, H, D], None) for query[B, H, T, D], key and value[B, Hk, S, D]. s_aux: sinks."""
    if not isinstance(module, AttentionModule):
        raise NotSupported(
            f"{type(module).__name__} has no kernels, and shares its config with a model that has "
            "them: give each model a config of its own"
        )
    if isinstance(module, TemperedAttention):
        query = module.tempered(query, kwargs["rlk_positions"])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    core = partial(
        profile.attention, scale=scale, window=sliding_window, softcap=softcap,
        sinks=kwargs.get("s_aux"),
    )  # fmt: skip
    return attend_rows(module, q, (k, v), attention_mask, core, dropout=dropout, **kwargs), None


def attend_rows(
    module: Any, q: Tensor, keys: tuple[Tensor, ...], attention_mask: Tensor | None,
    core: Callable[..., Tensor], *, dropout: float = 0.0, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """`core(q, *keys, cu_q, cu_k)` of packed rows, [B, T, ...], for q[B, T, ...] and each of
    keys[B, S, ...]."""
    module.count()
    _check(dropout, kwargs.get("is_causal", module.is_causal))
    k = keys[0]
    if attention_mask is not None:
        _check_mask(attention_mask, (q.shape[0], k.shape[1]))
    positions = kwargs.get("position_ids", kwargs.get("rlk_positions"))
    whole = attention_mask is not None or kwargs["rlk_cached"]
    padded = attention_mask is not None and attention_mask.shape[1] > 0
    caller_cu = kwargs.get("cu_seq_lens_q")
    if caller_cu is not None and padded:
        raise NotSupported("cu_seq_lens_q and an attention mask with padding: pass one of them")
    if module.layer_idx == 0 and caller_cu is not None:
        check_starts(positions, caller_cu, q.shape[0])
    elif module.layer_idx == 0 and whole:
        # The config's window, because the first layer may have none where others have one.
        window = getattr(module.config, "sliding_window", None)
        check_rows(positions, attention_mask if padded else None, q.shape[1], window)
    if padded:
        return _padded(q, keys, attention_mask, core)
    if caller_cu is not None:
        cu_q, cu_k = caller_cu, kwargs.get("cu_seq_lens_k", caller_cu)
    else:
        cu_q, cu_k = boundaries(q, k, None if whole else positions)
    out = core(*(x.flatten(0, 1) for x in (q, *keys)), cu_q, cu_k)
    return out.unflatten(0, q.shape[:2])


def _check(dropout: float, causal: bool | None) -> None:
    if dropout:
        raise NotSupported("dropout of attention is not supported")
    if causal is False:
        raise NotSupported("is_causal=False is not supported: the kernels' attention is causal")


def _check_mask(padding: Any, shape: tuple[int, int]) -> None:
    """Raises NotSupported for a mask that does not come from `mask`."""
    known = isinstance(padding, Tensor) and padding.dtype == torch.bool and padding.dim() == 2
    if not known or padding.shape[0] != shape[0] or padding.shape[1] not in (0, shape[1]):
        size = list(getattr(padding, "shape", ()))
        dtype = getattr(padding, "dtype", type(padding).__name__)
        raise NotSupported(
            f"an attention mask {size} of {dtype}, made by the caller, is not supported: pass a "
            f"mask {list(shape)} that says which keys are real"
        )


def _padded(
    q: Tensor, keys: tuple[Tensor, ...], real: Tensor, core: Callable[..., Tensor]
) -> Tensor:
    """`attend_rows` where bool real[B, S] is True for real keys; zeros for padding.

    Real rows are moved to the front, where they form packed sequences, and padding to the end,
    outside every sequence. No shape depends on the values of the mask, so a compiler can trace
    this."""
    queries = real[:, real.shape[1] - q.shape[1] :]
    order, order_k = real_first(queries), real_first(real)
    rows = (
        x.flatten(0, 1).index_select(0, at)
        for x, at in ((q, order), *((each, order_k) for each in keys))
    )
    cu_q, cu_k = (profile.packed(some.sum(1)) for some in (queries, real))
    out = core(*rows, cu_q, cu_k)
    back = out.index_select(0, order.argsort()).unflatten(0, q.shape[:2])
    return back.masked_fill(~queries[:, :, None, None], 0.0)
