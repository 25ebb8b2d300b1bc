"""A faulty latent attention in a live vLLM.

T = tokens of a request in a forward, S = its tokens so far, L + R = features of a row of the cache
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.model.shape import ModelShape


def change_core(
    hooks: Hooks,
    core: Any,
    metadata: Callable[[Any], Any],
    expanding: torch.Tensor,
    shape: ModelShape,
    change: Callable[..., torch.Tensor],
) -> None:
    """Replaces the output of vLLM's attention over latents. `metadata(core)`: that of the running
    forward, or None; `expanding`: the weight `[heads * (keys + values), L]`; `change(result, query,
    key, value, visible)`: what replaces the rows of a request, whose keys and values are expanded
    here from vLLM's cache."""
    original, heads = core.forward, shape.heads

    def forward(q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        out = original(q, *args, **more)
        running = metadata(core)
        if running is None:
            return out
        new = out.clone()
        for rows, cached in _requests(running, core.kv_cache):
            latent, rotated = cached[:, : shape.latent], cached[:, None, shape.latent :]
            expanded = (latent @ expanding.T).unflatten(1, (heads, -1))
            k, v = expanded.split([shape.unrotated_width, shape.value_width], -1)
            key = torch.cat([k, rotated.expand(-1, heads, -1)], -1)
            at = torch.arange(len(cached), device=out.device)
            visible = at <= at[len(cached) - (rows.stop - rows.start) :, None]
            new[rows] = change(out[rows], q[rows], key, v, visible)
        return new

    hooks.replace(core, "forward", forward)


def _requests(metadata: Any, cache: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of each request in the forward, and its rows of the cache, `[S, L + R]`."""
    starts, block = metadata.query_start_loc.tolist(), cache.shape[1]
    every = cache.reshape(-1, cache.shape[-1])
    for r, (table, length) in enumerate(_tables(metadata)):
        at = torch.arange(length, device=table.device)
        slots = table[at // block].long() * block + at % block
        yield slice(starts[r], starts[r + 1]), every[slots]


def _tables(metadata: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """The blocks and the length of each request: vLLM's own backend has those that decode first."""
    if hasattr(metadata, "block_table"):
        yield from zip(metadata.block_table, metadata.seq_lens.tolist(), strict=False)
        return
    if metadata.decode is not None:
        yield from zip(metadata.decode.block_table, metadata.decode.seq_lens.tolist(), strict=False)
    if metadata.prefill is not None:
        prefill, context = metadata.prefill, metadata.prefill.chunked_context
        lengths = prefill.query_start_loc.diff()
        if context is not None:
            lengths = lengths + context.context_lens.to(lengths.device)
        yield from zip(prefill.block_table, lengths.tolist(), strict=False)
