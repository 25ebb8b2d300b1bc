"""Compiling the kernels of paged attention before a request of an engine waits for them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.attention.call import AttentionCall


def batches(sequences: int, tokens: int, group: int, few: int) -> Iterator[tuple[int, int]]:
    """(sequences, queries) of batches that launch every variant of batches up to this size.
    Variants depend on the next power of two of the sequences and on the queries of each. few: the
    number of packed rows of a sequence up to which its queries count as few."""
    few = max(1, few // group)
    yield from ((1, queries) for queries in range(1, min(few + 1, tokens) + 1))
    powers = (2**i for i in range(1, sequences.bit_length()))
    counts = {count for power in powers for count in (power - 1, power, power + 1)}
    for batch in sorted(x for x in counts | {sequences} if 1 < x <= sequences):
        yield from sorted({(batch, min(batch * each, tokens)) for each in (1, 2, few, few + 1)})


def warm_up_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *, window: int | None = None,
    softcap: float | None = None, sequences: int, tokens: int, wait: bool = True,
) -> bool:  # fmt: skip
    """Compile, several kernels at a time, what `paged_attention` and `paged_schedule` will launch
    for calls with these tensors, in batches of at most `sequences` sequences and `tokens` queries,
    without sinks.

    Of q only the heads and the dtype matter, of the block table its width; no values are read.
    Returns False, with nothing compiled, while a CUDA graph is captured; the torch backend has
    nothing to compile. Without `wait`, threads continue to compile, and a launch waits for its own
    kernel.
    """
    if choose("warm_up_paged_attention", None, q, k_cache, v_cache, block_table) == "torch":
        return True
    from rlk_kernels.ops.attention.forward import FEW, forward

    heads, width = q.shape[1:], block_table.shape[1]
    pitch = max(block_table.stride(0), width)
    with on_device_of(q), compiled_ahead(q.device, wait) as ahead:
        group = q.shape[1] // k_cache.shape[-2]
        for batch, queries in batches(sequences, tokens, group, FEW) if ahead else ():
            integers = block_table.new_empty(batch + 1, dtype=torch.int32)
            table = block_table.new_empty(batch, pitch, dtype=torch.int32)
            forward(
                AttentionCall(
                    q.new_empty(queries, *heads), k_cache, v_cache, integers, integers[:batch],
                    table[:, :width], True, 1.0, window, softcap or 0.0,
                )
            )  # fmt: skip
    return ahead
