"""Compiles what an engine will launch on a GPU while it starts, several kernels at a time, so that
no request waits for a compiler. (Without CUDA graphs vLLM may not call attention while it starts;
its kernels are then compiled at the first request.)

What weights alone decide is compiled by threads while vLLM goes on to torch.compile; before graphs
are captured and anything is served, `finish` waits for the rest.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rlk_kernels
from rlk_kernels.ahead import finish

ROW_STEP = 31
"""Rows between two products that are planned. A prime, so that most sizes of a last tile come up:
which kernel runs follows the rows that are left for it, too. Sizes that are left out are compiled
when they are needed."""
_compiled: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class Sizes:
    """The sizes of an engine's steps."""

    rows: tuple[int, ...]
    """Rows of products: those of the engine's CUDA graphs, powers of two, every `ROW_STEP`-th
    number, and the largest."""
    sequences: int
    """The largest number of sequences."""
    tokens: int
    """The largest number of tokens."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """Rows that logits are computed for."""
        return *(x for x in self.rows if x < self.sequences), self.sequences


def sizes_of(config: Any) -> Sizes:
    """The sizes that a VllmConfig allows."""
    scheduler = config.scheduler_config
    most = scheduler.max_num_batched_tokens
    powers = {2**i for i in range(most.bit_length())}
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    rows = powers.union(captured, range(ROW_STEP, most, ROW_STEP), [most])
    return Sizes(tuple(sorted(rows)), scheduler.max_num_seqs, most)


def compile_products(
    weight: Tensor, bias: Tensor | None, rows: tuple[int, ...], out_dtype: torch.dtype | None = None
) -> None:
    """Compile the products by a weight; once for weights of one shape."""
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
    """Compile what a sparse layer launches; once for layers of one form."""
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
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None, config: Any
) -> None:
    """Have threads compile what attention will launch, by a VllmConfig and for a cache and tables
    as vLLM usually lays them out. `compile_attention` sees those that there are: most of a minute's
    compiling would otherwise begin there, while graphs are captured."""
    block, sizes = config.cache_config.block_size, sizes_of(config)
    form = heads, kv_heads, dim, dtype, window, block, sizes
    if block is None or form in _compiled:
        return
    blocks = -(-config.model_config.max_model_len // block)
    here = {"dtype": dtype, "device": "cuda"}
    cache = torch.empty(1, block, kv_heads, 2 * dim, **here)
    table = torch.empty(1, blocks, dtype=torch.int32, device=here["device"])
    rlk_kernels.warm_up_paged_attention(
        torch.empty(1, heads, dim, **here), *cache.split(dim, -1), table, window=window,
        sequences=sizes.sequences, tokens=sizes.tokens, wait=False,
    )  # fmt: skip
    _compiled.add(form)


def compile_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, window: int | None, sizes: Sizes
) -> bool:
    """Compile what attention launches; once for layers of one form. False: not while a graph is
    captured."""
    form = (
        q.shape[1:], q.dtype, q.device, k_cache.shape[1:], k_cache.stride(), table.shape[1],
        table.stride(), window, sizes,
    )  # fmt: skip
    if form not in _compiled:
        finish()
        if not rlk_kernels.warm_up_paged_attention(
            q, k_cache, v_cache, table, window=window, sequences=sizes.sequences,
            tokens=sizes.tokens,
        ):  # fmt: skip
            return False
        _compiled.add(form)
    return True
