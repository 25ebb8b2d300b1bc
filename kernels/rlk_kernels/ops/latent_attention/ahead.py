"""Compiling the kernels of paged latent attention before a request of an engine waits for them."""

from collections.abc import Collection

import torch
from torch import Tensor

from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.device import lazy_module
from rlk_kernels.ops.head_linear.operator import head_linear

_on_triton = lazy_module("rlk_kernels.ops.latent_attention.on_triton")


def warm_up_paged_latent_attention(
    q: Tensor, cache: Tensor, block_table: Tensor, *, keys: Tensor, values: Tensor, sequences: int,
    tokens: Collection[int], wait: bool = True,
) -> None:  # fmt: skip
    """Compile, several kernels at a time, what `paged_latent_attention` will launch for calls with
    these tensors, in batches of at most `sequences` sequences, and what `head_linear` will launch
    for the products around it, for each number of `tokens`.

    Of q[T, H, N + R] only the heads, the width and the dtype matter: it has a head's features
    before they are multiplied by keys[H, L, N]; values[H, E, L] multiplies the outputs. Of the
    block table its width matters; no values are read. The torch backend has nothing to compile, and
    nothing is compiled while a CUDA graph is captured. Without `wait`, threads continue to compile,
    and a launch waits for its own kernel.
    """
    if choose("warm_up_paged_latent_attention", None, q, cache, block_table) == "torch":
        return
    (heads, latent, width), most = keys.shape, max(tokens, default=0)
    with on_device_of(q), torch.no_grad(), compiled_ahead(q.device, wait) as ahead:
        for batch in _batches(sequences) if ahead else ():
            integers = block_table.new_empty(batch + 1, dtype=torch.int32)
            table = block_table.new_empty(batch, block_table.shape[1], dtype=torch.int32)
            rows = q.new_empty(batch, heads, cache.shape[2])
            # What the shape decides; chunks of one program, and of several, which are merged.
            for ways in (None, 1, 2):
                lens = integers[:batch]
                _on_triton().forward(rows, cache, integers, lens, table, latent, 1.0, ways)
        given = q.new_empty(most if ahead else 0, *q.shape[1:])
        attended = q.new_empty(len(given), heads, latent)
        for t in tokens if ahead else ():
            head_linear(given[:t, :, :width], keys, given[:t, :, width:])
            head_linear(attended[:t], values)


def _batches(sequences: int) -> list[int]:
    """Numbers of sequences that launch every variant of up to this many: variants depend on whether
    there is one, and on the next power of two."""
    powers = (2**i for i in range(sequences.bit_length()))
    return sorted({sequences, *powers})
