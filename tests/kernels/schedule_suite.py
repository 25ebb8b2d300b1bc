"""Small batches over a paged cache whose keys are split, for tests of lists of pieces."""

import torch
from kernel_suite import packed, paged_cache

CHUNK, PAGE, HEADS = 32, 8, (2, 1, 16)
"""Keys of a chunk and of a block; heads, key-value heads and their size."""
DECODE = ([1, 1, 1, 1], [0, 100, 33, 64])
"""Queries and keys of each sequence."""
MIXED = ([1, 12, 0, 5], [80, 70, 40, 3])


def wide_batch(lens_q, lens_k, width, heads=HEADS, page=PAGE, dtype=torch.float32, device="cpu"):
    """(q, k_cache, v_cache, table, lengths, cu_q), the table `width` blocks wider than it must be:
    what stands there is no block."""
    q, k, v, cu_q, cu_k = packed(lens_q, lens_k, *heads, dtype, device)
    k_cache, v_cache, table, lens = paged_cache(k, v, cu_k, page=page)
    wide = torch.nn.functional.pad(table, (0, width), value=1 << 30)
    return q, k_cache, v_cache, wide, lens.int(), cu_q.int()
