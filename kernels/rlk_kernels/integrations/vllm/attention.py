"""What the attention backends of CPUs and GPUs have in common.

The cache is logical [blocks, Hk, P, 2 D], keys before values, and lies as [blocks, P, Hk, 2 D], so
that the kernels read it as it lies. T = packed tokens, P = tokens of a block.
"""

from typing import Any

from torch import Tensor

import rlk_kernels
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.operators import Counted


def keys_and_values(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values, [blocks, P, Hk, D] each: views of a cache [blocks, Hk, P, 2 D]."""
    whole = cache.transpose(1, 2)
    return whole.split(whole.shape[-1] // 2, dim=-1)


def first(x: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of x; x itself if it has no more."""
    return x if x.shape[0] == rows else x[:rows]


def refuse(what: dict[str, bool]) -> None:
    """Raises NotServed with the names of those that are True."""
    if refused := [name for name, is_so in what.items() if is_so]:
        raise NotServed(f"rlk_kernels in vLLM does not serve {', '.join(refused)}")


class VllmAttention(Counted):
    """What the backends of CPUs and GPUs have in common."""

    scale: float
    rlk_window: int | None
    rlk_cache: tuple[Any, ...] = (None, 0, None)
    """The layer's cache, its address, and its keys and values: a step asks for them twice."""

    def keys_and_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        known, address, halves = self.rlk_cache
        if known is not cache or address != cache.data_ptr():
            halves = keys_and_values(cache)
            self.rlk_cache = cache, cache.data_ptr(), halves
        return halves

    def attend(self, query: Tensor, cache: Tensor, metadata: Any, output: Tensor) -> None:
        """Writes [T, H, D] to output; rows from `num_actual_tokens` on are unused."""
        self.count()
        if metadata.causal is not True:
            raise NotServed("attention that is not causal is not served")
        rows = metadata.num_actual_tokens
        query, (k, v) = first(query, rows), self.keys_and_values(cache)
        tables = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        profile.paged_attention(
            query, k, v, *tables, self.scale, self.rlk_window, first(output, rows),
            self.schedule(metadata, query, k, v, *tables),
        )  # fmt: skip

    def schedule(self, metadata: Any, *call: Tensor) -> rlk_kernels.Schedule | None:
        """The `paged_schedule` that the layers of a pass share; CPUs need none."""
        return None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the rows that have a slot; padding comes after the last slot, or has slot -1."""
        rows = min(key.shape[0], slot_mapping.shape[0])
        k, v = self.keys_and_values(kv_cache)
        rlk_kernels.write_kv_cache(
            first(key, rows), first(value, rows), k, v, first(slot_mapping, rows)
        )
