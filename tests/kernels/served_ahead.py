"""A program: which variants of kernels batches of a serving engine launch that were not compiled
while it started, on an H200 that is not there.

Triton chooses each variant as it always does, and compiles none. Prints how many were compiled
ahead, and those that were not. With `--fault` the engine says that it serves one request at a time,
and one token to experts.
Not under TRITON_INTERPRET, so in a process of its own, with kernels/ and tests/support/ on its path
(`test_compiled_ahead.py`).
"""

import random
import sys
from unittest import mock

import rlk_kernels as rk
import torch
from offline_h200 import h200
from replayed_launches import empty, integers
from rlk_kernels import cuda
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.vllm import ahead
from rlk_kernels.matmul import self_check
from triton.runtime.jit import JITFunction, compute_cache_key

HIDDEN, MIDDLE, VOCABULARY = 1024, 3072, 151_936
HEADS, KV_HEADS, DIM = 16, 8, 128
EXPERTS, CHOSEN, INNER = 128, 8, 768
LATENT, ROTATED, UNROTATED, VALUES = 512, 64, 128, 128
SEQUENCES, TOKENS = 256, 8192


class Scheduler:
    max_num_batched_tokens, max_num_seqs = TOKENS, SEQUENCES


class Config:
    """What is asked of a VllmConfig."""

    scheduler_config = Scheduler

    class compilation_config:
        cudagraph_capture_sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))

    class cache_config:
        block_size = 16

    class model_config:
        max_model_len = 40_960


def attend(sequences: int, tokens: int, pages: int, cache: torch.Tensor) -> None:
    arguments = empty(tokens, HEADS, DIM), *cache.split(DIM, -1)
    tables = integers(sequences, pages), integers(sequences)
    options = {"cu_seqlens_q": integers(sequences + 1)}
    schedule = rk.paged_schedule(*arguments, *tables, **options)
    rk.paged_attention(*arguments, *tables, **options, schedule=schedule)


def sparse_layer(tokens: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    logits = torch.empty(tokens, EXPERTS, device=gate_up.device)
    weights, ids = rk.route(logits, CHOSEN)
    groups = rk.group_by_expert(ids, EXPERTS)
    act = rk.grouped_swiglu(empty(tokens, HIDDEN), gate_up, groups)
    rk.combine_experts(rk.grouped_linear(act, down, groups), weights, ids, EXPERTS)


def attend_latents(
    sequences: int, tokens: int, pages: int, cache: torch.Tensor, weight: profile.Absorbed
) -> None:
    q = empty(tokens, HEADS, UNROTATED + ROTATED)
    queries = profile.latent_queries(q[..., :UNROTATED], q[..., UNROTATED:], weight)
    tables = integers(sequences, pages), integers(sequences)
    profile.paged_latent_attention(queries, cache, weight, *tables, integers(sequences + 1), 0.1)


def serve(
    weights: list[torch.Tensor],
    experts: tuple[torch.Tensor, torch.Tensor],
    head: torch.Tensor,
    cache: torch.Tensor,
    latents: tuple[torch.Tensor, profile.Absorbed],
) -> None:
    """Steps of all sizes: some of decoding alone, some with prompts or pieces of prompts."""
    random_ = random.Random(0)
    for _ in range(60):
        sequences = random_.randint(1, SEQUENCES)
        tokens = min(TOKENS, int(sequences * 2 ** random_.uniform(0, 10)))
        for batch, queries in ((sequences, sequences), (sequences, tokens), (1, tokens)):
            for pages in (40, 2560):
                attend(batch, queries, pages, cache)
                attend_latents(batch, queries, pages, *latents)
        for weight in weights:
            rk.linear(empty(tokens, weight.shape[1]), weight)
        sparse_layer(tokens, *experts)
        sparse_layer(sequences, *experts)
        rk.linear(empty(sequences, HIDDEN), head, out_dtype=torch.float32)


def main(fault: bool) -> int:
    known, late, compiling = set(), [], True

    def met(name: str, variant) -> None:
        if variant not in known and not compiling:
            late.append(name)
        known.add(variant)

    def launch(kernel, *arguments, grid=None, warmup=False, **options):
        _, keys, _, _, bind = kernel.device_caches[0]
        options |= {"debug": False, "instrumentation_mode": ""}
        _, specialization, options = bind(*arguments, **options)
        name = kernel.__name__
        met(name, (name, compute_cache_key(keys, specialization, options)))

    def launch_cuda(self, source, *_) -> None:
        met(f"{source.entry}.cu", source)

    with (
        h200(),
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(cuda, "launch", launch_cuda),
        mock.patch.object(self_check, "tiles_agree", return_value=True),
        torch.no_grad(),
    ):
        sizes = ahead.sizes_of(Config)
        weights = [empty((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), empty(HIDDEN, HEADS * DIM)]
        weights += [empty(2 * MIDDLE, HIDDEN), empty(HIDDEN, MIDDLE)]
        experts = empty(EXPERTS, 2 * INNER, HIDDEN), empty(EXPERTS, HIDDEN, INNER)
        head, cache = empty(VOCABULARY, HIDDEN), empty(64, 16, KV_HEADS, 2 * DIM)
        for weight in weights:
            ahead.compile_products(weight, None, sizes.rows)
        before = len(known)
        ahead.compile_experts(*experts, CHOSEN, True, (1,) if fault else sizes.rows)
        print("sparse:", len(known) - before)
        ahead.compile_products(head, None, sizes.sampled, torch.float32)
        if fault:
            Scheduler.max_num_seqs = 1
        sizes = ahead.sizes_of(Config)
        before = len(known)
        ahead.expect_attention(HEADS, KV_HEADS, DIM, torch.bfloat16, None, None, Config)
        print("expected:", len(known) - before)
        expanding = empty(HEADS * (UNROTATED + VALUES), LATENT)
        weight = profile.absorbed(expanding, HEADS, UNROTATED)
        before = len(known)
        ahead.expect_latent_attention(weight, ROTATED, torch.bfloat16, Config)
        print("latents:", len(known) - before)
        before = len(known)
        many, arguments = empty(12_345, 16, KV_HEADS, 2 * DIM), (empty(1, HEADS, DIM),)
        assert ahead.compile_attention(
            *arguments, *many.split(DIM, -1), integers(1, 2560), None, None, sizes
        )
        print("unexpected:", len(known) - before)
        for pages in (40, 2560):
            arguments = empty(1, HEADS, DIM), *cache.split(DIM, -1), integers(1, pages)
            assert ahead.compile_attention(*arguments, None, None, sizes)
        compiled, compiling = len(known), False
        serve(weights, experts, head, cache, (empty(64, 16, LATENT + ROTATED), weight))
    print("compiled:", compiled)
    print("late:", *sorted(late))
    return int(bool(late) or not compiled)


if __name__ == "__main__":
    sys.exit(main("--fault" in sys.argv))
