"""Compiling what paged attention will launch in an engine, before a request waits for it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.attention.call import AttentionCall


def batches(sequences: int, tokens: int, group: int, few: int) -> Iterator[tuple[int, int]]:
    """(sequences, queries) of batches that launch every variant that any batch of up to this many
    does. Variants follow the next power of two of the sequences, and how many queries each has.
    few: packed rows of a sequence up to which its queries are few."""
    few = max(1, few // group)
    yield from ((1, queries) for queries in range(1, min(few + 1, tokens) + 1))
    powers = (2**i for i in range(1, sequences.bit_length()))
    counts = {count for power in powers for count in (power - 1, power, power + 1)}
    for batch in sorted(x for x in counts | {sequences} if 1 < x <= sequences):
        yield from sorted({(batch, min(batch * each, tokens)) for each in (1, 2, few, few + 1)})


def warm_up_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *, window: int | None = None,
    sequences: int, tokens: int, wait: bool = True,
) -> bool:  # fmt: skip
    """Compile, several kernels at a time, what `paged_attention` and `paged_schedule` will launch
    for calls like this one, in batches of at most `sequences` sequences and `queries` queries.

    The tensors are as theirs: of q the heads and the dtype count, of the block table its width, and
    no values. Neither a softcap nor sinks. False, with nothing compiled, while a CUDA graph is
    captured; on the torch backend there is nothing to compile. Without `wait`, threads go on
    compiling, and a launch waits for its own kernel.
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
                    table[:, :width], True, 1.0, window,
                )
            )  # fmt: skip
    return ahead
