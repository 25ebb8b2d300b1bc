"""Compiles the kernels that an engine on a GPU will launch, several at a time, while the engine
starts, so that no request waits for a compiler. (Without CUDA graphs, vLLM may not call attention
while it starts; attention is then compiled at the first request.)

Threads compile the kernels that depend on weights alone while vLLM runs torch.compile. `finish`
waits for them before graphs are captured and requests are answered.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rlk_kernels
from rlk_kernels.ahead import finish
from rlk_kernels.integrations import profile

ROW_STEP = 31
"""The difference between two numbers of rows for which products are planned. It is a prime, so that
most sizes of the last tile occur, because the choice of the kernel depends on them too. Other sizes
are compiled when they are needed."""
_compiled: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class Sizes:
    """The sizes of an engine's steps."""

    rows: tuple[int, ...]
    """Numbers of rows of products: those of the engine's CUDA graphs, powers of two, multiples of
    `ROW_STEP`, and the largest."""
    sequences: int
    """The largest number of sequences."""
    tokens: int
    """The largest number of tokens."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """The numbers of rows for which logits are computed."""
        return *(x for x in self.rows if x < self.sequences), self.sequences


def sizes_of(config: Any) -> Sizes:
    """The sizes of the steps that a VllmConfig allows."""
    scheduler = config.scheduler_config
    most = scheduler.max_num_batched_tokens
    powers = {2**i for i in range(most.bit_length())}
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    rows = powers.union(captured, range(ROW_STEP, most, ROW_STEP), [most])
    return Sizes(tuple(sorted(rows)), scheduler.max_num_seqs, most)


def compile_products(
    weight: Tensor, bias: Tensor | None, rows: tuple[int, ...], out_dtype: torch.dtype | None = None
) -> None:
    """Compiles the products by a weight, once for all weights of one shape."""
    of_bias = None if bias is None else bias.dtype
    form = weight.shape, weight.stride(), weight.dtype, weight.device, of_bias, rows, out_dtype
    if form not in _compiled:
        linears = [(weight.detach(), bias)]
        rlk_kernels.warm_up(
            weight.device, linears=linears, rows=rows, out_dtype=out_dtype, wait=False
        )
        _compiled.add(form)


def compile_experts(
    gate_up: Tensor, down: Tensor, experts_per_token: int, normalize: bool, tokens: tuple[int, ...]
) -> None:
    """Compiles the kernels of a sparse layer, once for all layers of one shape."""
    form = (
        gate_up.shape, gate_up.stride(), down.shape, down.stride(), down.dtype, down.device,
        experts_per_token, normalize, tokens,
    )  # fmt: skip
    if form not in _compiled:
        rlk_kernels.warm_up_experts(
            gate_up.detach(), down.detach(), experts_per_token=experts_per_token,
            normalize=normalize, tokens=tokens, wait=False,
        )  # fmt: skip
        _compiled.add(form)


def expect_attention(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None,
    softcap: float | None, config: Any,
) -> None:  # fmt: skip
    """Starts threads that compile attention for a VllmConfig, assuming vLLM's usual layout of the
    cache and the tables. `compile_attention` later sees the actual ones; without this function most
    of a minute's compilation would begin there, while graphs are captured."""
    block, sizes = config.cache_config.block_size, sizes_of(config)
    form = heads, kv_heads, dim, dtype, window, softcap, block, sizes
    if block is None or form in _compiled:
        return
    blocks = -(-config.model_config.max_model_len // block)
    here = {"dtype": dtype, "device": "cuda"}
    cache = torch.empty(1, block, kv_heads, 2 * dim, **here)
    table = torch.empty(1, blocks, dtype=torch.int32, device=here["device"])
    rlk_kernels.warm_up_paged_attention(
        torch.empty(1, heads, dim, **here), *cache.split(dim, -1), table, window=window,
        softcap=softcap, sequences=sizes.sequences, tokens=sizes.tokens, wait=False,
    )  # fmt: skip
    _compiled.add(form)


def expect_latent_attention(
    weight: profile.Absorbed, rotated: int, dtype: torch.dtype, config: Any
) -> None:
    """Starts threads that compile latent attention for a VllmConfig, and the products around it.
    rotated: the number of features of a head that are rotated."""
    block, sizes = config.cache_config.block_size, sizes_of(config)
    (heads, latent, width), (_, features, _) = weight.keys.shape, weight.values.shape
    form = heads, latent, width, features, rotated, dtype, block, sizes
    if block is None or form in _compiled:
        return
    blocks = -(-config.model_config.max_model_len // block)
    here = {"dtype": dtype, "device": weight.keys.device}
    rlk_kernels.warm_up_paged_latent_attention(
        torch.empty(1, heads, width + rotated, **here),
        torch.empty(1, block, latent + rotated, **here),
        torch.empty(1, blocks, dtype=torch.int32, device=here["device"]),
        keys=weight.keys, values=weight.values, sequences=sizes.sequences, tokens=sizes.rows,
        wait=False,
    )  # fmt: skip
    _compiled.add(form)


def compile_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, window: int | None,
    softcap: float | None, sizes: Sizes,
) -> bool:  # fmt: skip
    """Compiles attention, once for all layers of one shape. Returns False without compiling while a
    graph is captured."""
    form = (
        q.shape[1:], q.dtype, q.device, k_cache.shape[1:], k_cache.stride(), table.shape[1],
        table.stride(), window, softcap, sizes,
    )  # fmt: skip
    if form not in _compiled:
        finish()
        if not rlk_kernels.warm_up_paged_attention(
            q, k_cache, v_cache, table, window=window, softcap=softcap,
            sequences=sizes.sequences, tokens=sizes.tokens,
        ):  # fmt: skip
            return False
        _compiled.add(form)
    return True
