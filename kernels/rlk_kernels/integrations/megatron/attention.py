"""The attention core of the layer spec: padded on either side, packed, or within a window.

S = length, B = sequences, H = heads, D = size, T = packed tokens.
"""

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.operators import Counted

CAUSAL = (None, AttnMaskType.causal, AttnMaskType.padding_causal)


class CoreAttention(Counted, DotProductAttention):
    """Causal; keys that a mask hides may only be padding in front of a sequence."""

    def __init__(self, *args: Any, windows: tuple[int | None, ...] = (), **kwargs: Any) -> None:
        """`windows`: for each layer, how many keys a query sees, itself included, None for all;
        without it, what the config says."""
        super().__init__(*args, **kwargs)
        at = self.layer_number
        self.window = windows[at - 1] if windows else window_of(self.config, at)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        attn_mask_type: Any = None, attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """`[S, B, H, D]` -> `[S, B, H * D]`; packed `[T, H, D]` -> `[T, H * D]`."""
        if attention_bias is not None:
            raise NotServed("a bias on attention's scores is not served")
        if attn_mask_type not in CAUSAL:
            raise NotServed(
                f"attn_mask_type={attn_mask_type} is not served: the kernels' is causal"
            )
        self.count()
        if packed_seq_params is not None:
            return self._attend(query, key, value, *boundaries(packed_seq_params)).flatten(1)
        length, batch = query.shape[:2]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        first = _first_rows(attention_mask, length, batch, query.device)
        if first is None:
            cu = torch.arange(0, (batch + 1) * length, length, device=query.device)
            rows = (x.flatten(0, 1) for x in (q, k, v))
            out = self._attend(*rows, cu, cu).unflatten(0, (batch, length))
        else:
            real = torch.arange(length, device=query.device) >= first[:, None]
            cu = profile.packed(real.sum(1))
            out = torch.zeros_like(q)
            out[real] = self._attend(q[real], k[real], v[real], cu, cu)
        return out.transpose(0, 1).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return profile.attention(q, k, v, cu_q, cu_k, self.softmax_scale, self.window)


def window_of(config: Any, layer_number: int) -> int | None:
    """How many keys a query of a layer (counted from 1) sees by `window_size`, which counts those
    before it and those behind; None for all. Raises NotServed where some lie behind."""
    size, frequency = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(size, frequency, layer_number):
        return None
    before, behind = size
    if before < 0 or behind != 0:
        raise NotServed(f"window_size={tuple(size)} is not served; (keys before a query, 0) is")
    return before + 1


def boundaries(packed: Any) -> tuple[Tensor, Tensor]:
    """cu_seqlens of queries and of keys, of `packed_seq_params`. Where each sequence has padding
    behind it, that counts as its end: nothing before it sees it."""
    padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    plain = packed.cu_seqlens_q, packed.cu_seqlens_kv
    q, k = (a if a is not None else b for a, b in zip(padded, plain, strict=True))
    return q, k


KNOWN = "rlk_first_rows"
"""Of a mask: `_first_rows` and the version of the mask that it is of."""


def _first_rows(
    mask: Tensor | None, length: int, batch: int, device: torch.device
) -> Tensor | None:
    """int64 `[B]`: how many rows of padding each sequence has in front; None for none at all.

    Of bool `[B or 1, 1, S, S]`, True where a query may not see a key. Asked once of each mask, by
    the first layer, and again where it was written to. Raises NotServed for a mask that hides
    anything else.
    """
    if mask is None:
        return None
    # Nobody counts what is written to a tensor of inference mode.
    version = None if mask.is_inference() else mask._version
    known, asked = getattr(mask, KNOWN, (None, None))
    if asked is None or asked != version:
        hidden = mask[:, 0].expand(batch, length, length)
        first = hidden[:, -1].sum(1)
        at = torch.arange(length, device=device)
        causal = at[None, :] > at[:, None]
        expected = causal | (at[None, None, :] < first[:, None, None])
        # What a row of padding sees is nobody's.
        same = (hidden == expected) | (at[None, :, None] < first[:, None, None])
        if not bool(same.all()):
            raise NotServed("an attention mask that is not causal with padding in front or behind")
        known = first if bool(first.any()) else None
        setattr(mask, KNOWN, (known, version))
    return known
