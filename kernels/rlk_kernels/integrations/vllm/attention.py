"""The common part of the attention backends of CPUs and GPUs.

The cache has the shape [blocks, Hk, P, 2 D], keys before values, and the memory layout
[blocks, P, Hk, 2 D], which the kernels read directly. T = packed tokens, P = tokens of a block.
"""

from typing import Any

from torch import Tensor

import rlk_kernels
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted


def keys_and_values(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values, [blocks, P, Hk, D] each: views of a cache [blocks, Hk, P, 2 D]."""
    whole = cache.transpose(1, 2)
    return whole.split(whole.shape[-1] // 2, dim=-1)


def first(x: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of x; x itself if it has no more."""
    return x if x.shape[0] == rows else x[:rows]


def refuse(settings: dict[str, bool]) -> None:
    """Raises NotSupported with the names of the settings that are True."""
    if refused := [name for name, is_set in settings.items() if is_set]:
        raise NotSupported(f"rlk_kernels in vLLM does not support {', '.join(refused)}")


class VllmAttention(Counted):
    """The common base of the backends of CPUs and GPUs."""

    scale: float
    rlk_window: int | None
    rlk_softcap: float | None = None
    sinks: Tensor | None = None
    rlk_cache: tuple[Any, ...] = (None, 0, None)
    """(the layer's cache, its address, its keys and values), because a step needs them twice."""

    def keys_and_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        known, address, halves = self.rlk_cache
        if known is not cache or address != cache.data_ptr():
            halves = keys_and_values(cache)
            self.rlk_cache = cache, cache.data_ptr(), halves
        return halves

    def attend(self, query: Tensor, cache: Tensor, metadata: Any, output: Tensor) -> None:
        """Writes [T, H, D] to output. Rows from `num_actual_tokens` on are padding."""
        self.count()
        if metadata.causal is not True:
            raise NotSupported("only causal attention is supported")
        rows = metadata.num_actual_tokens
        query, (k, v) = first(query, rows), self.keys_and_values(cache)
        tables = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        profile.paged_attention(
            query, k, v, *tables, self.scale, self.rlk_window, first(output, rows),
            self.schedule(metadata, query, k, v, *tables), self.rlk_softcap, self.sinks,
        )  # fmt: skip

    def schedule(self, metadata: Any, *call: Tensor) -> rlk_kernels.Schedule | None:
        """The `paged_schedule` that the layers of a pass share; None on CPUs."""
        return None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the rows that have a slot. Padding has no slot, or slot -1."""
        rows = min(key.shape[0], slot_mapping.shape[0])
        k, v = self.keys_and_values(kv_cache)
        rlk_kernels.write_kv_cache(
            first(key, rows), first(value, rows), k, v, first(slot_mapping, rows)
        )
