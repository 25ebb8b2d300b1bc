"""What every operator must do, for any backend, device and dtype: used on the CPU and on GPUs.

M = rows
"""

from collections.abc import Callable
from dataclasses import dataclass

import rlk_kernels as rk
import torch
from rlk_kernels.ops.activation.operator import activation_ref
from rlk_kernels.ops.attention.operator import attention_ref
from rlk_kernels.ops.clamped_swiglu.operator import clamped_swiglu_ref
from rlk_kernels.ops.layer_norm.operator import layer_norm_ref
from rlk_kernels.ops.linear import linear_ref
from rlk_kernels.ops.logp.operator import logp_ref
from rlk_kernels.ops.lora.operator import add_lora_ref
from rlk_kernels.ops.position_scale.operator import position_scale_ref
from rlk_kernels.ops.rms_norm.operator import rms_norm_ref
from rlk_kernels.ops.rope.operator import rope_ref
from rlk_kernels.ops.softcap.operator import softcap_ref
from rlk_kernels.ops.swiglu.operator import swiglu_ref
from torch import Tensor

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 65, 127, 129, 1000)
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-12}
"""What the budget rule allows on top of torch's own error, relative to the truth's magnitude."""

CLAMP = {"alpha": 1.702, "limit": 2.0}


@dataclass(frozen=True)
class Row:
    """An operator that maps rows to rows: `make(m)` gives per-row inputs, `run(backend, *rows)`
    per-row outputs, `truth(*rows)` float64, `torch_run` what torch itself does at the dtype."""

    make: Callable[[int], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    truth: Callable[..., Tensor]
    torch_run: Callable[..., Tensor]


def rand(*shape: int, dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def row_operators(dtype: torch.dtype, device: str, size: int = 96) -> dict[str, Row]:
    """Every operator whose rows are independent, with weights of a ragged size near `size`."""
    n, k, vocabulary = size - 7, size + 5, 4 * size + 3

    def r(*shape, seed, scale=1.0):
        return rand(*shape, dtype=dtype, device=device, seed=seed, scale=scale)

    weight, bias = r(n, k, seed=1), r(n, seed=2)
    gain, table = r(k, seed=3), r(vocabulary, k, seed=4)
    functional = torch.nn.functional

    def positions(m):
        return torch.randint(0, 30000, (m,), generator=torch.Generator().manual_seed(m)).to(device)

    def targets(m):
        generator = torch.Generator().manual_seed(m + 1)
        return torch.randint(0, vocabulary, (m,), generator=generator).to(device)

    def torch_rope(q, p):
        frequency = 1.0 / 1e4 ** (torch.arange(0, 32, 2, device=device).float() / 32)
        angle = p[:, None].float() * frequency
        c, s = angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]
        a, b = q[..., :16], q[..., 16:]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    adapters = r(3, 8, k, seed=5), r(3, n, 8, seed=6)
    scales = torch.tensor([2.0, 0.3, 0.0], dtype=torch.promote_types(dtype, torch.float32))
    scales = scales.to(device)

    def slots(m):
        generator = torch.Generator().manual_seed(m + 2)
        return torch.randint(-1, 4, (m,), generator=generator).to(device)

    def torch_lora(base, x, of):
        a, b = (each[of.clamp(0, 2)] for each in adapters)
        update = (b @ (a @ x[..., None])).squeeze(-1) * scales[of.clamp(0, 2), None].to(dtype)
        return torch.where(((of >= 0) & (of < 3))[:, None], base + update, base)

    def torch_norm(x, eps=1e-6):
        wide = x.float() if dtype != torch.float64 else x
        return gain * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(dtype)

    def with_residual(x, res, backend):
        return torch.cat(rk.rms_norm(x, gain, 1e-6, residual=res, backend=backend), -1)

    def torch_with_residual(x, res):
        return torch.cat([torch_norm(x + res), x + res], -1)

    def torch_clamped(g, u):
        g, u = g.clamp(max=CLAMP["limit"]), u.clamp(-CLAMP["limit"], CLAMP["limit"])
        return g * torch.sigmoid(g * CLAMP["alpha"]) * (u + 1)

    return {
        "linear": Row(
            lambda m: (r(m, k, seed=10 + m),),
            lambda x, backend: rk.linear(x, weight, bias, backend=backend),
            lambda x: linear_ref(x, weight, bias),
            lambda x: functional.linear(x, weight, bias),
        ),
        "linear_fp32_out": Row(
            lambda m: (r(m, k, seed=10 + m),),
            lambda x, backend: rk.linear(x, weight, out_dtype=torch.float32, backend=backend),
            lambda x: linear_ref(x, weight),
            lambda x: functional.linear(x.float(), weight.float()),
        ),
        "add_lora": Row(
            lambda m: (r(m, n, seed=10 + m), r(m, k, seed=11 + m), slots(m)),
            lambda base, x, of, backend: rk.add_lora(
                x, base, *adapters, scales, of, backend=backend
            ),
            lambda base, x, of: add_lora_ref(x, base, *adapters, scales, of),
            torch_lora,
        ),
        "rms_norm": Row(
            lambda m: (r(m, k, seed=20 + m),),
            lambda x, backend: rk.rms_norm(x, gain, 1e-6, backend=backend),
            lambda x: rms_norm_ref(x, gain, 1e-6),
            torch_norm,
        ),
        "rms_norm_vllm": Row(
            lambda m: (r(m, k, seed=20 + m, scale=30.0),),
            lambda x, backend: rk.rms_norm(x, gain, 1e-6, cast="vllm", backend=backend),
            lambda x: rms_norm_ref(x, gain, 1e-6),
            torch_norm,
        ),
        "rms_norm_residual": Row(
            lambda m: (r(m, k, seed=30 + m), r(m, k, seed=31 + m)),
            with_residual,
            lambda x, res: torch.cat([rms_norm_ref((x + res), gain, 1e-6), (x + res).double()], -1),
            torch_with_residual,
        ),
        "rope": Row(
            lambda m: (r(m, 3, 32, seed=40 + m), positions(m)),
            lambda q, p, backend: rk.rope(q, q[:, :1], p, theta=1e4, backend=backend)[0],
            lambda q, p: rope_ref(q, p, 1e4),
            torch_rope,
        ),
        "swiglu": Row(
            lambda m: (r(m, k, seed=50 + m, scale=4.0), r(m, k, seed=51 + m)),
            lambda g, u, backend: rk.swiglu(g, u, backend=backend),
            swiglu_ref,
            lambda g, u: functional.silu(g) * u,
        ),
        "geglu": Row(
            lambda m: (r(m, k, seed=52 + m, scale=4.0), r(m, k, seed=53 + m)),
            lambda g, u, backend: rk.swiglu(g, u, activation="gelu_tanh", backend=backend),
            lambda g, u: swiglu_ref(g, u, "gelu_tanh"),
            lambda g, u: functional.gelu(g, approximate="tanh") * u,
        ),
        "softcap": Row(
            lambda m: (r(m, k, seed=54 + m, scale=4.0),),
            lambda x, backend: rk.softcap(x, 3.0, backend=backend),
            lambda x: softcap_ref(x, 3.0),
            lambda x: 3.0 * torch.tanh(x / 3.0),
        ),
        "clamped_swiglu": Row(
            # Both are often beyond the limit.
            lambda m: (r(m, k, seed=55 + m, scale=3.0), r(m, k, seed=56 + m, scale=3.0)),
            lambda g, u, backend: rk.clamped_swiglu(g, u, **CLAMP, backend=backend),
            lambda g, u: clamped_swiglu_ref(g, u, **CLAMP),
            torch_clamped,
        ),
        "relu2": Row(
            lambda m: (r(m, k, seed=57 + m, scale=4.0),),
            lambda x, backend: rk.activation(x, "relu2", backend=backend),
            lambda x: activation_ref(x, "relu2"),
            lambda x: functional.relu(x).square(),
        ),
        "gelu": Row(
            lambda m: (r(m, k, seed=58 + m, scale=4.0),),
            lambda x, backend: rk.activation(x, "gelu_tanh", backend=backend),
            lambda x: activation_ref(x, "gelu_tanh"),
            lambda x: functional.gelu(x, approximate="tanh"),
        ),
        "layer_norm": Row(
            lambda m: (r(m, k, seed=59 + m, scale=30.0),),
            lambda x, backend: rk.layer_norm(x, gain, 1e-6, gain.flip(0), backend=backend),
            lambda x: layer_norm_ref(x, gain, gain.flip(0), 1e-6),
            lambda x: functional.layer_norm(x, (k,), gain, gain.flip(0), 1e-6),
        ),
        "layer_norm, no bias": Row(
            lambda m: (r(m, k, seed=59 + m) + 5.0,),
            lambda x, backend: rk.layer_norm(x, gain, 1e-6, backend=backend),
            lambda x: layer_norm_ref(x, gain, None, 1e-6),
            lambda x: functional.layer_norm(x, (k,), gain, None, 1e-6),
        ),
        "position_scale": Row(
            lambda m: (37 * torch.arange(m, device=device),),
            lambda p, backend: rk.position_scale(p, beta=0.3, context=16, backend=backend),
            lambda p: position_scale_ref(p, 0.3, 16),
            lambda p: 1 + 0.3 * torch.log(1 + torch.floor(p / 16)),
        ),
        "embedding": Row(
            lambda m: (targets(m),),
            lambda ids, backend: rk.embedding(ids, table, backend=backend),
            lambda ids: table[ids].double(),
            lambda ids: table[ids],
        ),
        "logp": Row(
            lambda m: (r(m, vocabulary, seed=60 + m, scale=6.0), targets(m)),
            lambda x, t, backend: rk.logp(x, t, temperature=0.7, backend=backend),
            lambda x, t: logp_ref(x, t, 0.7),
            lambda x, t: torch.log_softmax(x.float() / 0.7, -1).gather(-1, t[:, None]).squeeze(-1),
        ),
    }


def same(a, b) -> bool:
    """Whether two sequences of tensors have the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def within_budget(value: Tensor, truth: Tensor, torch_value: Tensor, dtype: torch.dtype) -> bool:
    """max |value - truth| <= max |torch - truth| + limit x scale; NaN and empty fail."""
    if value.numel() == 0 or value.shape != truth.shape:
        return False
    scale = float(truth.abs().max()) + 1e-6
    error = float((value.double() - truth).abs().max())
    torch_error = float((torch_value.double() - truth).abs().max())
    return error <= torch_error + LIMIT[dtype] * scale


def differing_rows(op: Row, backend: str, rows: tuple[Tensor, ...], picked: Tensor) -> int:
    """How many of the `picked` rows have other bits among themselves than in the whole batch."""
    whole = op.run(*rows, backend=backend)
    part = op.run(*(x[picked] for x in rows), backend=backend)
    same = (part == whole[picked]).reshape(picked.numel(), -1).all(-1)
    return int(picked.numel() - same.sum())


def packed(lens_q, lens_k, heads, kv_heads, dim, dtype, device, seed=0):
    """(q, k, v, cu_q, cu_k) of random sequences."""
    q = rand(sum(lens_q), heads, dim, dtype=dtype, device=device, seed=seed)
    k = rand(sum(lens_k), kv_heads, dim, dtype=dtype, device=device, seed=seed + 1)
    v = rand(sum(lens_k), kv_heads, dim, dtype=dtype, device=device, seed=seed + 2)
    cu = [torch.tensor([0, *x]).cumsum(0).to(device) for x in (lens_q, lens_k)]
    return q, k, v, *cu


def paged_cache(k, v, cu_k, page: int, seed: int = 0, spare: int = 3):
    """k and v in a shuffled cache whose unused slots hold NaN: (k_cache, v_cache, table, lens)."""
    lens = (cu_k[1:] - cu_k[:-1]).tolist()
    blocks = [-(-n // page) for n in lens]
    order = torch.randperm(sum(blocks) + spare, generator=torch.Generator().manual_seed(seed))
    caches = [
        torch.full((sum(blocks) + spare, page, *x.shape[1:]), float("nan"), dtype=x.dtype)
        for x in (k, v)
    ]
    table = torch.zeros(len(lens), max([*blocks, 1]), dtype=torch.int32)
    used = 0
    for b, n in enumerate(lens):
        for i in range(blocks[b]):
            block = int(order[used])
            used += 1
            table[b, i] = block
            begin = int(cu_k[b]) + i * page
            end = min(begin + page, int(cu_k[b]) + n)
            for cache, x in zip(caches, (k, v), strict=True):
                cache[block, : end - begin] = x[begin:end].cpu()
    device = k.device
    return (
        caches[0].to(device),
        caches[1].to(device),
        table.to(device),
        torch.tensor(lens).to(device),
    )


def attention_truth(q, k, v, cu_q, cu_k, **options):
    return attention_ref(q, k, v, cu_q.cpu(), cu_k.cpu(), **options)


def torch_attention(q, k, v, cu_q, cu_k, *, causal=True, window=None):
    """torch's own at the inputs' dtype: scores, softmax in fp32, product."""
    outs = []
    for b in range(cu_q.numel() - 1):
        qb = q[cu_q[b] : cu_q[b + 1]].transpose(0, 1)
        kb, vb = (
            x[cu_k[b] : cu_k[b + 1]].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
            for x in (k, v)
        )
        s = (qb @ kb.mT) * q.shape[-1] ** -0.5
        key = torch.arange(kb.shape[1], device=q.device)[None]
        last = torch.arange(qb.shape[1], device=q.device)[:, None] + kb.shape[1] - qb.shape[1]
        last = last if causal else torch.full_like(last, kb.shape[1] - 1)
        visible = (key <= last) & (key > last - (window or 1 << 30))
        p = torch.softmax(s.masked_fill(~visible, float("-inf")).float(), -1).to(q.dtype)
        outs.append((p @ vb).transpose(0, 1))
    return torch.cat(outs)


def attention_within_budget(
    args, backend: str | None, causal: bool, window: int | None, limit: float
) -> bool:
    """Whether out of `attention` is within its budget, and lse within `limit`."""
    options = {"causal": causal, "window": window}
    out, lse = rk.attention(*args, return_lse=True, backend=backend, **options)
    truth, lse_truth = attention_truth(*args, **options)
    good = within_budget(out, truth, torch_attention(*args, **options), args[0].dtype)
    return good and float((lse - lse_truth).abs().max()) < limit
