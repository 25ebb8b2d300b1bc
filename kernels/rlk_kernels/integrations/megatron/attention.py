"""The attention core of the layer spec, for sequences that are padded on either side or packed,
with or without a window.

S = length, B = sequences, H = heads, D = size, T = packed tokens.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.parallel.context import check_lengths
from rlk_kernels.parallel.copies import size_of

CAUSAL = (None, AttnMaskType.causal, AttnMaskType.padding_causal)


class CoreAttention(Counted, DotProductAttention):
    """Causal attention. A mask may only hide padding before or after a sequence."""

    def __init__(
        self, config: Any, *args: Any, windows: tuple[int | None, ...] = (), **kwargs: Any
    ) -> None:
        """windows: for each layer, the number of keys that a query sees, its own included, None for
        all; default: the config's."""
        # Megatron's DotProductAttention refuses context parallelism.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config
        self.context = context_group(config, self.pg_collection)
        at = self.layer_number
        self.window = windows[at - 1] if windows else window_of(self.config, at)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        attn_mask_type: Any = None, attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """`[S, B, H, D]` -> `[S, B, H * D]`; packed `[T, H, D]` -> `[T, H * D]`. With context
        parallelism, the rows are this rank's rows of each sequence."""
        kind, rows = (attn_mask_type, attention_bias), (query, key, value)
        return self.by_sequence(self._attend, rows, attention_mask, *kind, packed_seq_params)

    def by_sequence(
        self, core: Callable[..., Tensor], rows: tuple[Tensor, ...], attention_mask: Tensor | None,
        attn_mask_type: Any, attention_bias: Tensor | None, packed_seq_params: Any,
    ) -> Tensor:  # fmt: skip
        """The same of a core: (rows of all sequences, one after another, and twice the bounds of
        the sequences) -> `[T, H, D]`. The first of `rows` are queries."""
        query = rows[0]
        if attention_bias is not None:
            raise NotSupported("a bias on attention scores is not supported")
        if attn_mask_type not in CAUSAL:
            raise NotSupported(
                f"attn_mask_type={attn_mask_type} is not supported: attention is causal"
            )
        self.count()
        if packed_seq_params is not None:
            cu = boundaries(packed_seq_params)
            if self.layer_number == 1:
                _check_pack(packed_seq_params, query)
                if self.context is not None:
                    check_lengths(cu, len(query) * size_of(self.context), size_of(self.context))
            return core(*rows, cu, cu).flatten(1)
        length, batch = query.shape[:2]
        by_batch = [x.transpose(0, 1) for x in rows]
        if self.context is not None and attention_mask is not None:
            raise NotSupported(
                "an attention mask with context parallelism is not supported: pass none, and pad "
                "after the sequences, or pack them"
            )
        first = _first_rows(attention_mask, length, batch, query.device)
        if first is None:
            whole = length * size_of(self.context)
            cu = torch.arange(0, (batch + 1) * whole, whole, device=query.device)
            every = (x.flatten(0, 1) for x in by_batch)
            out = core(*every, cu, cu).unflatten(0, (batch, length))
        else:
            real = torch.arange(length, device=query.device) >= first[:, None]
            cu = profile.packed(real.sum(1))
            attended = core(*(x[real] for x in by_batch), cu, cu)
            out = attended.new_zeros(batch, length, *attended.shape[1:])
            out[real] = attended
        return out.transpose(0, 1).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return profile.attention(q, k, v, cu_q, cu_k, self.softmax_scale, self.window, self.context)


def context_group(config: Any, groups: Any) -> Any:
    """The ranks that share sequences, from a ProcessGroupCollection or from megatron-core's
    parallel state; None if each rank has whole sequences."""
    if config.context_parallel_size == 1:
        return None
    group = getattr(groups, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def window_of(config: Any, layer_number: int) -> int | None:
    """The number of keys that a query sees in a layer (counted from 1), by the config's
    `window_size`, which counts the keys before and after the query; None for all keys. Raises
    NotSupported if it allows keys after the query."""
    size, frequency = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(size, frequency, layer_number):
        return None
    before, behind = size
    if before < 0 or behind != 0:
        raise NotSupported(
            f"window_size={tuple(size)} is not supported; use (keys before a query, 0)"
        )
    return before + 1


def boundaries(packed: Any) -> Tensor:
    """cu_seqlens of `packed_seq_params`, which are the same for queries and keys. Padding after a
    sequence counts as a part of it, because no earlier row attends to the padding.

    Raises NotSupported for a format other than `thd`.
    """
    if packed.qkv_format != "thd":
        raise NotSupported(
            f"packed_seq_params with qkv_format={packed.qkv_format}; only 'thd' is supported"
        )
    if packed.cp_group is not None or packed.local_cp_size is not None:
        raise NotSupported("packed_seq_params with their own cp_group are not supported")
    return _cu_seqlens(packed)[0]


def _cu_seqlens(packed: Any) -> list[Tensor]:
    padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    plain = packed.cu_seqlens_q, packed.cu_seqlens_kv
    return [x for x in padded if x is not None] or [x for x in plain if x is not None]


def _check_pack(packed: Any, query: Tensor) -> None:
    """Raises NotSupported if `packed_seq_params` do not describe the sequences of a single row of
    tokens."""
    if query.dim() != 3:
        raise NotSupported(
            f"packed_seq_params are supported with one row of ids only, not with {query.shape[1]}"
        )
    q, k = (_cu_seqlens(packed) * 2)[:2]
    if q is not k and (q.shape != k.shape or not bool((q == k).all())):
        raise NotSupported(
            "packed_seq_params with different cu_seqlens of queries and of keys are not supported"
        )


FIRST_ROWS = "rlk_first_rows"
"""The attribute of a mask with (its `_first_rows`, the version of the mask from which they were
computed)."""


def _first_rows(
    mask: Tensor | None, length: int, batch: int, device: torch.device
) -> Tensor | None:
    """int64 `[B]`: the number of rows of padding before each sequence; None if there are none.

    The mask is bool `[B or 1, 1, S, S]`, True where a query must not see a key. Rows of padding,
    before and after a sequence, do not see themselves. The first layer computes the result for each
    mask, and again after a write to the mask. Raises NotSupported for a mask that hides anything
    else.
    """
    if mask is None:
        return None
    # A tensor of inference mode has no version counter.
    version = None if mask.is_inference() else mask._version
    known, asked = getattr(mask, FIRST_ROWS, (None, None))
    if asked is None or asked != version:
        if mask.shape not in {(n, 1, length, length) for n in (1, batch)}:
            raise NotSupported(
                f"an attention mask {list(mask.shape)} is not supported; pass one mask for all "
                f"heads, {[batch, 1, length, length]}"
            )
        hidden = mask[:, 0].expand(batch, length, length)
        at = torch.arange(length, device=device)
        end = (at + 1).where(hidden.diagonal(dim1=1, dim2=2) == 0, 0).amax(1)
        if not bool(end.all()):
            raise NotSupported(
                "an attention mask hides every token of a sequence from itself: in megatron-core, "
                "True means that a query must not see a key"
            )
        last = hidden[torch.arange(batch, device=device), end - 1]
        first = ((last != 0) & (at < end[:, None])).sum(1)
        causal = at[None, :] > at[:, None]
        expected = causal | (at[None, None, :] < first[:, None, None])
        # The keys that a row of padding sees do not matter.
        row = at[None, :, None]
        padding = (row < first[:, None, None]) | (row >= end[:, None, None])
        if not bool(((hidden == expected) | padding).all()):
            raise NotSupported(
                "an attention mask must be causal, and may hide padding before or after a sequence"
            )
        known = first if bool(first.any()) else None
        setattr(mask, FIRST_ROWS, (known, version))
    return known
