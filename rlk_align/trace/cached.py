"""The inputs of attention as it reads them from a quantised cache."""

import torch

from rlk_align.model.block_fp8 import in_cache
from rlk_align.trace.schema import CacheRecord


def cached_keys(cache: CacheRecord | None, layer: int, keys: torch.Tensor) -> torch.Tensor:
    """Keys as they are read; themselves without a quantised cache."""
    return keys if cache is None else in_cache(keys, cache.scales[layer][0], cache.cuts)


def cached_values(cache: CacheRecord | None, layer: int, values: torch.Tensor) -> torch.Tensor:
    """Values, likewise."""
    return values if cache is None else in_cache(values, cache.scales[layer][1], cache.cuts)


def quantised_queries(cache: CacheRecord | None, layer: int, queries: torch.Tensor) -> torch.Tensor:
    """Queries as attention multiplies by them."""
    scale = None if cache is None else cache.queries.get(layer)
    return queries if scale is None else in_cache(queries, scale)
