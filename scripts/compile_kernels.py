"""Compiles every kernel for an H200 (sm_90a), without a GPU, and checks the compiled code.

    PYTHONPATH=.:kernels python scripts/compile_kernels.py [--once] [--only CALL ...]
    PYTHONPATH=.:kernels python scripts/compile_kernels.py --every

The operators run on tensors that have shapes and no memory (`tests/support/offline_h200.py`), and
each launch compiles its kernel with the installed Triton. The script prints a line for each variant
of a kernel: registers, bytes spilled, shared memory, wgmma instructions. The exit code is 1 if a
kernel does not compile, spills more than `SPILLS` allows, sets up a barrier that it does not use,
or, in a product of 64 rows or more on Hopper, has no wgmma instructions or serialized ones.
`--every` does this with the newest release of each Triton version in the supported range; each is
installed into a temporary folder and runs in its own process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels" / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import rlk_kernels as rk
import torch
import triton
from offline_h200 import Compiled, h200
from rlk_kernels.device import GLUON_TRITON, interpreting
from rlk_kernels.ops.latent_attention import on_triton as latent_attention
from rlk_kernels.parallel.peer import kernels as peer_kernels
from rlk_kernels.parallel.peer.channels import CHANNELS, Channels
from shapes import HEADS, LINEAR, ROWS

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = ("_gemm_tma_kernel", "_sum_tma_kernel", "_tiles_tma_kernel")
"""The kernels in plain Triton whose products are compiled to wgmma on Hopper."""
SPILLS = {
    "_attention_hopper_kernel": 2048,  # 24 and 368 with Triton 3.6, none in a step; 1076 with 3.9
    "_pieces_hopper_kernel": 2048,  # between the chunks of a piece; 348 with Triton 3.6
    "_sum_hopper_kernel": 512,
    "_tiles_hopper_kernel": 4096,  # split accumulation; none without it
    "_attention_kernel": 1 << 17,  # fp32, here and below
    "rows_kernel": 1 << 12,  # the gated delta rule's gradient: 56 with bf16, 720 with fp32
    "solved_kernel": 1 << 10,  # the same, fp32
    "decode_kernel": 1 << 12,  # the gated delta rule: what moves the state, once in 64 steps
    "states_kernel": 1 << 13,  # the gated delta rule, fp32; 64 with bf16
    "attend_kernel": 1 << 13,  # latent attention: an accumulator of half of the registers
    "queries_kernel": 1 << 13,  # its gradient, fp32; half of that with bf16
    "latent_hopper_kernel": 1 << 12,  # between the chunks of a piece; numbers in a step with 3.9
    "latents_kernel": 1 << 11,  # likewise; none with fp32
    "_dkv_hopper_kernel": 256,  # scalars between steps
    "_dq_hopper_kernel": 1024,  # none with Triton 3.6 to 3.8; 520 with 3.9
    "_dq_kernel": 1 << 11,
    "_dkv_kernel": 1 << 16,
    "_gemm_pointer_kernel": 1 << 15,  # strides that no copy engine takes
    "_grouped_kernel": 1 << 15,  # likewise
    "_reduce_kernel": 1 << 6,
    "_rows_by_slot_kernel": 1 << 8,  # the gradient of h at ranks of 64 and more; 24 with fp32
    "_route_bwd_kernel": 1 << 6,  # 8, where weights need not add up to 1
    "_route_fwd_kernel": 1 << 6,  # 8 with Triton 3.9, likewise
    "_sum_pointer_kernel": 1 << 11,
    "_tiles_pointer_kernel": 1 << 10,
}
"""Bytes that a kernel may spill, stored and loaded; 0 for the others."""
SERIAL = ("_rows_by_slot_kernel", "latents_kernel")
"""The kernels whose products may wait for one another: each has the whole rank of an adapter, or
an accumulator that is half of the registers of a processor."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _x(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype).requires_grad_()


def _ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def _backward(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


def linear(m: int, n: int, k: int, dtype=BF16, out=None, bias=False, backward=True) -> None:
    x, weight = _x(m, k, dtype=dtype), _x(n, k, dtype=dtype)
    y = rk.linear(x, weight, _x(n, dtype=dtype) if bias else None, out_dtype=out)
    if backward:
        _backward(y)


def linear_logp(t: int, h: int, v: int, dtype=BF16, logits=FP32, **options) -> None:
    hidden, weight = _x(t, h, dtype=dtype), _x(v, h, dtype=dtype)
    outputs = rk.linear_logp(hidden, weight, _ids(t), logit_dtype=logits, **options)
    _backward(*(outputs if isinstance(outputs, tuple) else (outputs,)))


def linear_grpo(t: int, h: int, v: int) -> None:
    advantages, mask = (_x(t, dtype=FP32).detach() for _ in range(2))
    loss, _ = rk.linear_grpo_loss(
        _x(t, h), _x(v, h), _ids(t), None, advantages, mask, cu_seqlens=_ids(5)
    )
    loss.backward()


def prefill(heads, sequences: int, tokens: int, dtype=BF16, backward=True, **options) -> None:
    hq, hk, dim = heads
    cu = _ids(sequences + 1, dtype=torch.int32)
    q, k, v = (_x(sequences * tokens, h, dim, dtype=dtype) for h in (hq, hk, hk))
    y = rk.attention(q, k, v, cu, cu, **options)
    if backward:
        _backward(y)


def unaligned_prefill(tokens: int) -> None:
    """Queries whose first byte, or whose rows, are not aligned to 16 bytes."""
    k, v = (_x(tokens, 8, 128).detach() for _ in range(2))
    cu = _ids(2, dtype=torch.int32)
    rk.attention(_x(1 + tokens * 4096).detach()[1:].view(tokens, 32, 128), k, v, cu, cu)
    rk.attention(_x(tokens, 4097).detach()[:, :4096].view(tokens, 32, 128), k, v, cu, cu)


def decode(heads, sequences: int, context: int, page: int = 16, queries: int = 1) -> None:
    hq, hk, dim = heads
    pages = context // page
    rk.paged_attention(
        _x(sequences * queries, hq, dim),
        *(_x(sequences * pages, page, hk, dim) for _ in range(2)),
        _ids(sequences, pages, dtype=torch.int32),
        _ids(sequences, dtype=torch.int32),
        cu_seqlens_q=_ids(sequences + 1, dtype=torch.int32),
    )


def rows(m: int, h: int = 4096, ff: int = 12288, v: int = 128256) -> None:
    """The operators that work row by row."""
    _backward(*rk.rms_norm(_x(m, h), _x(h), 1e-6, residual=_x(m, h)))
    _backward(rk.rms_norm(_x(m, 32, 128), _x(128), 1e-6))
    _backward(*rk.rope(_x(m, 32, 128), _x(m, 8, 128), _ids(m), theta=1e6))
    norms = _x(128), _x(128)
    rotation = {"eps": 1e-6, "theta": 1e6}
    for scaling in (None, _x(1, dtype=FP32).detach()):
        rotation["scaling"] = scaling
        _backward(*rk.norm_rope(_x(m, 32, 128), _x(m, 8, 128), *norms, _ids(m), **rotation))
    for activation in ("silu", "gelu_tanh", "sigmoid"):
        _backward(rk.swiglu(_x(m, ff), _x(m, ff), activation=activation))
    _backward(rk.softcap(_x(m, v, dtype=FP32), 30.0))
    _backward(rk.clamped_swiglu(_x(m, ff), _x(m, ff), alpha=1.702, limit=7.0))
    both = _x(m, 2 * ff)
    _backward(rk.clamped_swiglu(both[:, ::2], both[:, 1::2], alpha=1.702, limit=7.0))
    for kind in ("relu2", "gelu_tanh"):
        _backward(rk.activation(_x(m, ff), kind))
    for bias in (None, _x(h)):
        _backward(rk.layer_norm(_x(m, h), _x(h), 1e-5, bias))
    rk.position_scale(_ids(m), beta=0.1, context=16384)
    _backward(rk.embedding(_ids(m), _x(v, h)))
    _backward(rk.logp(_x(m, v), _ids(m)))
    _backward(rk.logp(_x(m, v), _ids(m), softcap=30.0, logit_scale=0.5))
    rk.logp(_x(m, v), _ids(m), token_ids=_ids(m, 4), top_k=20)
    rk.write_kv_cache(*(_x(m, 8, 128) for _ in range(2)), *_x(2, m, 16, 8, 128), _ids(m))


def head_norms(dim: int) -> None:
    """Norms of heads as in engines: dense, slices of fused q, k and v, and unaligned."""
    weights = _x(dim).detach(), _x(dim).detach()
    fused = _x(7, 9, dim).detach()
    behind = _x(1 + 7 * 5 * dim).detach()[1:].view(7, 5, dim)
    for q, k in (
        (fused[:, :5], fused[:, 5:7]),
        (fused[:, :5].contiguous(), fused[:, 5:7].contiguous()),
        (behind, behind),
    ):
        rk.rms_norm(q, weights[0], 1e-6)
        rk.norm_rope(q, k, *weights, _ids(7), eps=1e-6, theta=1e6)


def norms_of_a_branch(h: int, dtype=BF16) -> None:
    """The norms around a residual addition, each alone and as one operator."""
    x, weight = _x(7, h, dtype=dtype).detach(), _x(h, dtype=dtype).detach()
    for one_plus in (False, True):
        how = {"cast": "vllm", "one_plus": one_plus}
        rk.rms_norm(x, weight, 1e-6, residual=rk.rms_norm(x, weight, 1e-6, **how), **how)
        rk.norm_add_norm(x, x, weight, weight, 1e-6, **how)


def peer_gather(m: int, f: int, ranks: int = 2) -> None:
    channels = Channels(
        rank=0, ranks=ranks, count=CHANNELS, polls=1 << 20, regions=_ids(ranks),
        counters=_ids(CHANNELS, dtype=torch.int32), failed=_ids(1, dtype=torch.int32),
        missing=_ids(ranks, dtype=torch.int32),
    )  # fmt: skip
    peer_kernels.columns(_x(m, f).detach(), channels)


def sparse_layer(t: int, experts: int, top_k: int, h: int, inner: int, dtype=BF16) -> None:
    x, router = _x(t, h, dtype=dtype), _x(experts, h, dtype=dtype)
    up, down = _x(experts, 2 * inner, h, dtype=dtype), _x(experts, h, inner, dtype=dtype)
    for normalize in (True, False):
        logits = rk.linear(x, router, out_dtype=FP32)
        shares, ids = rk.route(logits, top_k, normalize=normalize)
        groups = rk.group_by_expert(ids, experts)
        rk.grouped_swiglu(x.detach(), up.detach(), groups)
        both = rk.grouped_linear(x, up, groups)
        rows = rk.grouped_linear(rk.swiglu(*both.chunk(2, -1)), down, groups)
        _backward(rk.combine_experts(rows, shares, ids, experts))


def adapters(t: int, count: int, rank: int, n: int, k: int, dtype=BF16) -> None:
    a, b = _x(count, rank, k, dtype=dtype), _x(count, n, rank, dtype=dtype)
    slots = None if count == 1 else _ids(t)
    scales = _x(count, dtype=FP32).detach()
    x, base = _x(t, k, dtype=dtype), _x(t, n, dtype=dtype)
    _backward(rk.add_lora(x, base, a, b, scales, slots))
    with torch.no_grad():
        projections = a.expand(3, *a.shape), scales.expand(3, count), (n // 2, n // 4, n // 4)
        rk.add_lora(x, base, projections[0], b, projections[1], slots, widths=projections[2])


def corrected_routing(t: int, experts: int, top_k: int, groups: int, top_groups: int) -> None:
    logits, correction = _x(t, experts, dtype=FP32), _x(experts, dtype=FP32)
    how = {"groups": groups, "top_groups": top_groups, "scale": 2.5}
    for normalize in (True, False):
        shares, _ = rk.route_corrected(logits, correction, top_k, normalize=normalize, **how)
        _backward(shares)


def delta_net(t: int, heads: int, value_heads: int, dim: int, dtype=BF16) -> None:
    """Whole sequences with gradients, and rows that continue sequences."""
    features = (2 * heads + value_heads) * dim
    mixed, taps, cu = _x(t, features, dtype=dtype), _x(features, 4, dtype=dtype), _ids(3)
    _backward(rk.causal_conv1d(mixed, taps, cu))
    gates = [_x(*shape, dtype=dtype) for shape in ((t, value_heads),) * 2 + ((value_heads,),) * 2]
    _backward(*rk.delta_gates(*gates))
    core = _x(t, value_heads, dim, dtype=dtype)
    _backward(rk.gated_rms_norm(core, core, _x(dim, dtype=dtype), 1e-6))
    g, beta = (x.detach() for x in rk.delta_gates(*gates))
    rows = [_x(t, n, dim, dtype=dtype) for n in (heads, heads, value_heads)]
    _backward(rk.gated_delta_rule(*rows, g, beta, cu))
    with torch.no_grad():
        kept = [
            _x(9, value_heads, dim, dim, dtype=FP32), _x(9, 64, heads, dim, dtype=dtype),
            _x(9, 64, value_heads, dim, dtype=dtype), _x(9, 64, value_heads, dtype=FP32),
        ]  # fmt: skip
        where = _ids(2, dtype=torch.int32), _ids(2, dtype=torch.int32), cu
        rk.cached_gated_delta_rule(*rows, g, beta, *kept, *where)
        rk.cached_causal_conv1d(mixed, taps, _x(9, 3, features, dtype=dtype), *where)


def latents(heads: int, sequences: int, tokens: int, dtype=BF16, widths=(512, 64)) -> None:
    """Training with gradients, and prefill and decode over a cache."""
    latent, rotated = widths
    cu, how = _ids(sequences + 1, dtype=torch.int32), {"latent": latent, "scale": 0.1}
    rows, width = sequences * tokens, latent + rotated
    q, keys = _x(rows, heads, width, dtype=dtype), _x(rows, width, dtype=dtype)
    _backward(rk.latent_attention(q, keys, cu, cu, **how))
    pages = tokens // 16
    cache = _x(sequences * pages, 16, width, dtype=dtype)
    table, lens = (_ids(*shape, dtype=torch.int32) for shape in ((sequences, pages), (sequences,)))
    for each in (q, q[:sequences]):
        rk.paged_latent_attention(each, cache, table, lens, cu_seqlens_q=cu, **how)


def products_by_head(tokens: int, heads: int, width: int) -> None:
    """Those around latent attention, with the weight of keys as it lies in the other's memory."""
    q, both = _x(tokens, heads, width + 64), _x(heads, width + 128, 512)
    with torch.no_grad():
        rk.head_linear(q[..., :width], both[:, :width].mT, q[..., width:])
        rk.head_linear(_x(tokens, heads, 512), both[:, width:])


def latents_on_hopper(
    heads: int, sequences: int, tokens: int, page: int = 64, queries: int = 1, dtype=BF16
) -> None:
    """Over a cache, or without one (page 0)."""
    q, pages = _x(sequences * queries, heads, 576, dtype=dtype), tokens // (page or 1)
    cu, lens = (_ids(sequences + i, dtype=torch.int32) for i in (1, 0 if page else 1))
    keys = (
        _x(sequences * pages, page, 576, dtype=dtype)
        if page
        else _x(sequences * tokens, 576, dtype=dtype)
    )
    table = _ids(sequences, pages, dtype=torch.int32) if page else None
    latent_attention.forward(q, keys, cu, lens, table, 512, 0.1, special=True)


def sampling(t: int, v: int, dtype=FP32) -> None:
    """Rows of a padded vocabulary, with and without truncation."""
    logits, where = _x(t, v + 64, dtype=dtype).detach()[:, :v], (_ids(t), _ids(t))
    heat, top_p, min_p = (_x(t, dtype=FP32).detach() for _ in range(3))
    limits = {"top_k": _ids(t, dtype=torch.int32), "top_p": top_p, "min_p": min_p}
    for few in ({}, limits):
        rk.sample(logits, *where, temperature=heat, raw_logprobs=not few, **few)
    rk.kept_tokens(logits, temperature=heat, **limits)


def hidden_sampling(t: int, h: int, v: int, dtype=BF16, logits=FP32, **options) -> None:
    """Without log-probs at temperature 1, and with them."""
    hidden, weight, where = _x(t, h, dtype=dtype), _x(v, h, dtype=dtype), (_ids(t), _ids(t))
    for raw in (False, True):
        rk.linear_sample(
            hidden.detach(), weight.detach(), *where, logit_dtype=logits, raw_logprobs=raw,
            temperature=_x(t, dtype=FP32).detach(), **options,
        )  # fmt: skip


LARGE, SMALL = HEADS.values()
CALLS: dict[str, Callable[[], object]] = {
    "tiles": lambda: rk.warm_up("cuda"),  # comes first, because the first product would run it
    "linear, one wave of 64 rows": lambda: linear(256, 6144, 4096),
    "linear, one wave of 128 rows": lambda: linear(512, 6144, 4096, bias=True, backward=False),
    "linear, many rows": lambda: linear(8192, 6144, 4096),
    "linear, fp32 out": lambda: linear(8192, 6144, 4096, out=FP32, backward=False),
    "linear, fp32 out, few rows": lambda: linear(64, 6144, 4096, out=FP32, backward=False),
    "linear, fp16": lambda: linear(256, 6144, 4096, dtype=FP16),
    "linear, fp32": lambda: linear(256, 4096, 1024, dtype=FP32),
    "linear, main_grad": lambda: _backward(
        rk.linear(_x(4096, 4096), _x(6144, 4096), main_grad=_x(6144, 4096, dtype=FP32).detach())
    ),
    "linear, unaligned": lambda: linear(100, 1023, 999, bias=True),
    **{
        f"linear, {model} {layer}, {m} rows": lambda m=m, n=n, k=k: linear(m, n, k, backward=False)
        for model, layers in LINEAR.items()
        for layer, (n, k) in layers.items()
        for m in ROWS
    },
    "prefill": lambda: prefill(LARGE, 1, 4096),
    "prefill, unaligned queries": lambda: unaligned_prefill(4096),
    "prefill, window": lambda: prefill(LARGE, 1, 4096, window=1024),
    "prefill, not causal, fp16": lambda: prefill(LARGE, 1, 4096, dtype=FP16, causal=False),
    "prefill, sinks": lambda: prefill(LARGE, 1, 4096, sinks=_x(32, dtype=FP32)),
    "prefill, softcap": lambda: prefill(LARGE, 1, 4096, softcap=30.0),
    "prefill, head size 64": lambda: prefill((16, 8, 64), 1, 4096),
    "prefill, head size 64, long": lambda: prefill((16, 8, 64), 1, 16384, backward=False),
    "prefill, head size 256": lambda: prefill((16, 8, 256), 1, 4096),
    "prefill, fp32": lambda: prefill(LARGE, 1, 4096, dtype=FP32),
    "prefill, 16 query heads": lambda: prefill(SMALL, 1, 4096),
    "decode": lambda: decode(LARGE, 64, 512),
    "decode, split": lambda: decode(LARGE, 8, 4096),
    "decode, one sequence": lambda: decode(LARGE, 1, 4096),
    "decode, one short sequence": lambda: decode(LARGE, 1, 512),
    "decode, split, 16 query heads": lambda: decode(SMALL, 8, 4096),
    "decode, pages of 256": lambda: decode(LARGE, 8, 4096, page=256),
    "decode, head size 256": lambda: decode((8, 4, 256), 8, 4096),
    "prefill over a cache, head size 256": lambda: decode((8, 4, 256), 8, 4096, queries=512),
    "prefill over a cache, pages of 1": lambda: decode(LARGE, 8, 4096, page=1, queries=512),
    "linear_logp": lambda: linear_logp(4096, 4096, 128256),
    "linear_logp, not split": lambda: linear_logp(1024, 768, 151936),
    "linear_logp, bf16 logits": lambda: linear_logp(4096, 4096, 151936, logits=BF16),
    "linear_logp, entropy": lambda: linear_logp(
        4096, 4096, 128256, return_lse=True, return_entropy=True
    ),
    "linear_logp, softcap, bias, odd V": lambda: linear_logp(
        4096, 4096, 100001, softcap=30.0, temperature=0.7, bias=_x(100001)
    ),
    "linear_logp, H 1024": lambda: linear_logp(1024, 1024, 151936),
    "linear_logp, two passes": lambda: linear_logp(32768, 4096, 128256),
    "linear_logp, fp16": lambda: linear_logp(4096, 4096, 128256, dtype=FP16, logits=FP16),
    "linear_logp, fp32": lambda: linear_logp(1024, 512, 32000, dtype=FP32),
    "linear_logp, unaligned": lambda: linear_logp(100, 999, 1023),
    "linear_grpo_loss": lambda: linear_grpo(4096, 4096, 128256),
    **{
        f"sparse layer, {t} tokens": lambda t=t: sparse_layer(t, 128, 8, 2048, 768)
        for t in (1, 256, 1024, 16384)
    },
    "sparse layer, fp16, unaligned": lambda: sparse_layer(300, 60, 4, 1001, 700, dtype=FP16),
    "corrected routing": lambda: corrected_routing(4096, 256, 8, 8, 4),
    "corrected routing, one group": lambda: corrected_routing(300, 160, 8, 1, 1),
    "sparse layer, fp32": lambda: sparse_layer(300, 8, 2, 512, 256, dtype=FP32),
    "delta net": lambda: delta_net(1024, 16, 32, 128),
    "delta net, small heads, fp32": lambda: delta_net(300, 2, 4, 24, dtype=FP32),
    "latents": lambda: latents(128, 4, 4096),
    "latents, one sequence": lambda: latents(20, 1, 4096),
    "latents, few features": lambda: latents(4, 3, 64, dtype=FP16, widths=(32, 8)),
    "latents on Hopper": lambda: latents_on_hopper(128, 32, 4096),
    "latents on Hopper, one sequence": lambda: latents_on_hopper(128, 1, 4096),
    "latents on Hopper, few keys": lambda: latents_on_hopper(128, 64, 512),
    "latents on Hopper, 20 heads, pages of 16": lambda: latents_on_hopper(20, 3, 2048, page=16),
    "latents on Hopper, no cache": lambda: latents_on_hopper(128, 2, 4096, 0, 4096, FP16),
    "products by head": lambda: products_by_head(8192, 128, 128),
    "products by head, few tokens": lambda: products_by_head(1, 20, 192),
    "latents, fp32": lambda: latents(16, 2, 1024, dtype=FP32),
    "rows": lambda: rows(1024),
    "adapters, one": lambda: adapters(8192, 1, 16, 12288, 4096),
    "adapters, one row": lambda: adapters(1, 1, 16, 6144, 4096),
    "adapters, one, few rows": lambda: adapters(256, 1, 16, 6144, 12288),
    "adapters, eight": lambda: adapters(64, 8, 64, 6144, 4096),
    "adapters, rank 64, many segments": lambda: adapters(300, 2, 64, 6144, 12288),
    "adapters, fp32": lambda: adapters(64, 2, 16, 1024, 1024, dtype=FP32),
    "sampling": lambda: sampling(64, 151936),
    "sampling, fp16": lambda: sampling(3, 1001, dtype=FP16),
    "sampling from hidden states": lambda: hidden_sampling(64, 4096, 151936),
    "sampling from hidden states, one row": lambda: hidden_sampling(1, 4096, 151936, logits=BF16),
    "sampling from hidden states, fp16, odd V": lambda: hidden_sampling(
        300, 512, 5001, dtype=FP16, bias=_x(5001).detach().to(FP16)
    ),
    "peer gather": lambda: peer_gather(64, 6144),
    "peer gather, in pieces": lambda: peer_gather(16384, 6144),
    "peer gather, 8 ranks": lambda: peer_gather(1, 1536, 8),
    **{f"norms of heads of {dim}": lambda dim=dim: head_norms(dim) for dim in (36, 72)},
    "norms of a branch": lambda: norms_of_a_branch(2560),
    "norms of a branch, fp16, unaligned": lambda: norms_of_a_branch(1001, dtype=FP16),
}
"""Name -> a call: all calls of the benchmarks, and other calls that have kernels of their own."""


def compile_calls(names: Collection[str], once: bool = False) -> Iterator[Compiled]:
    """Runs the calls and yields what each call compiles. once: only the first variant of each
    kernel."""
    with h200() as launches:
        launches.once = once
        for launches.call, run in CALLS.items():
            launches.compiling = launches.call in names
            if launches.compiling or launches.call == "tiles":
                run()
            yield from launches.compiled
            launches.compiled.clear()


def fault(x: Compiled) -> str:
    """The fault of a compiled kernel; "" where there is none."""
    if x.error:
        return x.error
    if (x.gluon or x.kernel in PRODUCTS) and not (x.wgmma or x.narrow):
        return "no wgmma"
    if x.unused_barriers:
        return f"barriers that are set up and not used: {x.unused_barriers}"
    if x.serialized and x.kernel not in SERIAL:
        return "wgmma waits for wgmma"
    if x.spills > SPILLS.get(x.kernel, 0):
        return f"spills {x.spills} bytes"
    return ""


def line(x: Compiled) -> str:
    numbers = f"{x.registers:5}{x.spills:8}{x.shared / 1024:8.1f}{x.wgmma:7}{x.seconds:8.1f}"
    return f"{x.kernel:27}{numbers}  {x.call:42}{fault(x) or 'ok'}"


def every(names: list[str]) -> int:
    """Runs this script with each version of the range; returns the number that failed."""
    failed = 0
    (major, first), (_, beyond) = GLUON_TRITON
    for version in (f"{major}.{minor}" for minor in range(first, beyond)):
        with tempfile.TemporaryDirectory() as folder:
            install = ["pip", "install", "-q", "--no-deps", "--target", folder]
            subprocess.run([sys.executable, "-m", *install, f"triton=={version}.*"], check=True)
            path = os.pathsep.join([folder, str(ROOT), str(ROOT / "kernels")])
            failed += subprocess.run(
                [sys.executable, __file__, "--only", *names],
                env={**os.environ, "PYTHONPATH": path},
            ).returncode
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL")
    parser.add_argument("--once", action="store_true", help="one variant of each kernel")
    parser.add_argument("--json", type=Path, help="write what was compiled, with its PTX")
    parser.add_argument("--every", action="store_true", help="with every Triton of the range")
    arguments = parser.parse_args(argv)
    if interpreting():
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    if arguments.every:
        return min(every(arguments.only), 1)
    print(f"Triton {triton.__version__}, sm_90a")
    print(f"{'kernel':27} regs  spills     KiB  wgmma seconds  first launched by")
    compiled = []
    for x in compile_calls(arguments.only, arguments.once):
        print(line(x), flush=True)
        compiled.append(x)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(x) for x in compiled]))
    return int(not compiled or any(map(fault, compiled)))


if __name__ == "__main__":
    sys.exit(main())
