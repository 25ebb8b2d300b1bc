"""The attention backend: keys and values in SGLang's pool, which the kernels read directly.

The pool has a buffer [slots, Hk, D] for the keys of a layer and one for its values, and
`req_to_token` has the slot of each position of a request. A page is a run of slots, so that a
request's pages are its block table. Prefill, decode, chunks and cached prefixes are one kernel.

B = requests   T = rows of all requests   H = heads   Hk = key-value heads   P = slots of a page
"""

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

import rlk_kernels
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted


class Attention(Counted):
    """A RadixAttention whose backend is `RlkAttentionBackend`, which counts its calls."""


class Requests(NamedTuple):
    """The arguments of `profile.paged_attention` that the layers of a forward share."""

    table: Tensor
    """int32 [B, pages]."""
    lengths: Tensor
    """int32 [B]: of whole sequences, cached prefixes included."""
    cu_rows: Tensor
    """int32 [B + 1]: where the rows of each request begin."""


class RlkAttentionBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        # SGLang reads these two names from outside of the class.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.attn_backend.kv_index_translator
        self.rlk_page = self.token_to_kv_pool.page_size
        self.rlk_requests: Requests | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens.int()
        if mode.is_idle():
            return
        if not (mode.is_decode() or mode.is_extend_without_speculative() or mode.is_mixed()):
            raise NotSupported(f"forward mode {mode.name} is not supported")
        rows = torch.ones_like(lengths) if mode.is_decode() else forward_batch.extend_seq_lens
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        pages = slots[:, : int(lengths.max()) : self.rlk_page] // self.rlk_page
        self.rlk_requests = Requests(pages.int(), lengths, profile.packed(rows))

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **more: Any,
    ) -> Tensor:  # fmt: skip
        """[T, H D] for q[T, H D], k and v[T, Hk, D]. Writes k and v to the slots of their rows."""
        given = sorted(name for name, value in more.items() if value is not None)
        if given or not save_kv_cache or k is None:
            raise NotSupported(
                "attention without the keys and values of its own rows, or with "
                f"{', '.join(given) or 'no keys to save'}, is not supported"
            )
        layer.count()
        assert self.rlk_requests is not None
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        keys, values = (
            buffer.view(-1, self.rlk_page, *buffer.shape[1:])
            for buffer in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        own = (x.reshape(-1, layer.tp_k_head_num, size) for x in (k, v))
        rlk_kernels.write_kv_cache(*own, keys, values, forward_batch.out_cache_loc)
        q = q.reshape(-1, heads, size)
        out = torch.empty_like(q)
        profile.paged_attention(q, keys, values, *self.rlk_requests, layer.scaling, None, out)
        return out.view(-1, heads * size)

    forward_extend = forward_decode
