"""The attention backend: keys and values in SGLang's pool, which the kernels read directly.

The pool has a buffer [slots, Hk, D] for the keys of a layer and one for its values, and
`req_to_token` has the slot of each position of a request. A page is a run of slots, so that a
request's pages are its block table. Prefill, decode, chunks and cached prefixes are one kernel.

B = requests   T = rows of all requests   H = heads   Hk = key-value heads   P = slots of a page
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

import rlk_kernels
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.schedules import Schedules


class Attention(Counted):
    """A RadixAttention whose backend is `RlkAttentionBackend`, which counts its calls."""


@dataclass
class Requests:
    """What the layers of a forward share."""

    table: Tensor
    """int32 [B, pages]."""
    lengths: Tensor
    """int32 [B]: of whole sequences, cached prefixes included."""
    cu_rows: Tensor
    """int32 [B + 1]: where the rows of each request begin."""
    schedules: Schedules = field(default_factory=Schedules)


class RlkAttentionBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        # SGLang reads these names from outside of the class.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner.attn_backend, "kv_index_translator", None)
        self.rlk_page = self.token_to_kv_pool.page_size
        self.rlk_requests: Requests | None = None
        self.rlk_graph: Requests | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens.int()
        if mode.is_idle():
            return
        if not (mode.is_decode() or mode.is_extend_without_speculative() or mode.is_mixed()):
            raise NotSupported(f"forward mode {mode.name} is not supported")
        rows = torch.ones_like(lengths) if mode.is_decode() else forward_batch.extend_seq_lens
        # Reading the lengths on a GPU would wait for it.
        known = forward_batch.seq_lens_cpu
        longest = int((lengths if known is None else known).max())
        pages = self._pages(forward_batch.req_pool_indices)[:, : -(-longest // self.rlk_page)]
        self.rlk_requests = Requests(pages.int(), lengths, profile.packed(rows))

    def _pages(self, requests: Tensor) -> Tensor:
        """[B, pages of the longest possible sequence]: the page of each run of positions."""
        slots = self.req_to_token_pool.req_to_token[requests, :: self.rlk_page]
        return slots // self.rlk_page

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The tables and lengths that graphs of decode steps read, for up to max_bs requests."""
        slots = self.req_to_token_pool.req_to_token
        here = {"dtype": torch.int32, "device": slots.device}
        self.rlk_graph = Requests(
            torch.zeros(max_bs, -(-slots.shape[1] // self.rlk_page), **here),
            torch.ones(max_bs, **here),
            torch.arange(max_bs + 1, **here),
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if not forward_batch.forward_mode.is_decode():
            raise NotSupported(f"a CUDA graph of {forward_batch.forward_mode.name} is unsupported")
        graph, count = self.rlk_graph, forward_batch.batch_size
        assert graph is not None
        graph.lengths[:count].copy_(forward_batch.seq_lens[:count])
        graph.table[:count].copy_(self._pages(forward_batch.req_pool_indices[:count]))
        self.rlk_requests = Requests(
            graph.table[:count], graph.lengths[:count], graph.cu_rows[: count + 1]
        )

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **more: Any,
    ) -> Tensor:  # fmt: skip
        """[T, H D] for q[T, H D], k and v[T, Hk, D]. Writes k and v to the slots of their rows,
        unless the rotation has done that."""
        given = sorted(name for name, value in more.items() if value is not None)
        if given or k is None:
            raise NotSupported(
                "attention without the keys and values of its own rows, or with "
                f"{', '.join(given) or 'no keys'}, is not supported"
            )
        layer.count()
        requests = self.rlk_requests
        assert requests is not None
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        keys, values = (
            buffer.view(-1, self.rlk_page, *buffer.shape[1:])
            for buffer in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        if save_kv_cache:
            own = (x.reshape(-1, layer.tp_k_head_num, size) for x in (k, v))
            rlk_kernels.write_kv_cache(*own, keys, values, forward_batch.out_cache_loc)
        q = q.reshape(-1, heads, size)
        out = torch.empty_like(q)
        tables = requests.table, requests.lengths, requests.cu_rows
        schedule = (
            requests.schedules.of(layer, None, None, q, keys, values, *tables)
            if q.is_cuda
            else None
        )
        profile.paged_attention(q, keys, values, *tables, layer.scaling, None, out, schedule)
        return out.view(-1, heads * size)

    forward_extend = forward_decode
