"""A fixed set of inputs for every public operator, and the digests of all that comes out.

The inputs come from integer arithmetic, so they are the same on every machine and with every
version of torch. A digest is BLAKE2b of the raw bytes: of each output, and of each gradient for an
upstream gradient that is fixed too.

T = tokens   V = vocabulary   H = hidden size   D = head size
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import rlk_kernels as rk
import torch
from torch import Tensor

DIGESTS = Path(__file__).with_name("digests.json")
"""By implementation: `torch`, and `triton` of an H200."""
HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)

Case = Callable[[], dict[str, Tensor]]


def _signed(x: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    return x - (1 << 64) if x >= 1 << 63 else x


class Inputs:
    """Tensors of one case, each from a seed of its own."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._seeds = itertools.count(1)

    def _bits(self, count: int) -> Tensor:
        """int64 `[count]`: splitmix64 of a counter, on the device; products wrap around."""
        x = (torch.arange(count, device=self.device) + (next(self._seeds) << 40)) * _signed(
            0x9E3779B97F4A7C15
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
        return x ^ (x >> 31 & (1 << 33) - 1)

    def normal(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        """Nearly normal numbers: four uniform ones added up."""
        bits = self._bits(math.prod(shape))
        total = sum(bits >> 16 * i & 0xFFFF for i in range(4))
        x = ((total.double() / 65536 - 2) * (3**0.5 * scale)).float().reshape(shape)
        return x.to(self.dtype).requires_grad_(grad)

    def integers(self, *shape: int, below: int) -> Tensor:
        return ((self._bits(math.prod(shape)) >> 11 & (1 << 53) - 1) % below).reshape(shape)

    def bounds(self, *lengths: int) -> Tensor:
        """int32: where packed sequences of these lengths begin."""
        return torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)


def digest(x: Tensor) -> str:
    raw = x.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(f"{x.dtype}{tuple(x.shape)}".encode() + raw, digest_size=8).hexdigest()


def with_gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, and the gradients of the leaves for a fixed upstream gradient of each output."""
    different = [x for x in outputs.values() if x.requires_grad]
    upstream = []
    for i, x in enumerate(different):
        ramp = torch.arange(x.numel(), device=x.device) * (2 * i + 3) % 29 - 14
        upstream.append((ramp / 16).reshape(x.shape).to(x.dtype))
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(different, list(wanted.values()), upstream)
    return outputs | {f"d_{n}": g for n, g in zip(wanted, grads, strict=True)}


def _linear(at: Inputs, m: int, n: int, k: int, wide: bool) -> dict[str, Tensor]:
    leaves = {"x": at.normal(m, k), "weight": at.normal(n, k), "bias": at.normal(n)}
    out = rk.linear(*leaves.values(), out_dtype=torch.float32 if wide else None)
    return with_gradients({"out": out}, leaves)


def _add_lora(at: Inputs, t: int, n: int, k: int, r: int) -> dict[str, Tensor]:
    leaves = {"x": at.normal(t, k), "base": at.normal(t, n)}
    leaves |= {"a": at.normal(3, r, k, scale=k**-0.5), "b": at.normal(3, n, r)}
    scales = torch.tensor([2.0, 0.3, 0.0], device=at.device)
    slots = at.integers(t, below=5) - 1
    out = rk.add_lora(*leaves.values(), scales, slots)
    return with_gradients({"out": out}, leaves)


def _rms_norm(at: Inputs, m: int, h: int, cast: str) -> dict[str, Tensor]:
    leaves = {"x": at.normal(m, h, scale=3.0), "weight": at.normal(h), "res": at.normal(m, h)}
    plain = rk.rms_norm(leaves["x"], leaves["weight"], 1e-6, cast=cast)
    both = rk.rms_norm(leaves["x"], leaves["weight"], 1e-6, residual=leaves["res"], cast=cast)
    return with_gradients({"plain": plain, "normed": both[0], "sum": both[1]}, leaves)


def _rope(at: Inputs, t: int, d: int, options: dict) -> dict[str, Tensor]:
    leaves = {"q": at.normal(t, 4, d), "k": at.normal(t, 2, d)}
    out = rk.rope(*leaves.values(), at.integers(t, below=40000), theta=1e6, **options)
    return with_gradients({"q": out[0], "k": out[1]}, leaves)


def _swiglu(at: Inputs, m: int, f: int) -> dict[str, Tensor]:
    leaves = {"gate": at.normal(m, f, scale=4.0), "up": at.normal(m, f)}
    return with_gradients({"out": rk.swiglu(*leaves.values())}, leaves)


def _delta_net(at: Inputs, lengths: tuple[int, ...], d: int, e: int) -> dict[str, Tensor]:
    """q, k and v of a convolution, the rule, and the gated norm of its output."""
    t, cu = sum(lengths), at.bounds(*lengths)
    leaves = {"x": at.normal(t, 2 * d + 2 * e), "weight": at.normal(2 * d + 2 * e, 4)}
    leaves |= {"a": at.normal(t, 2), "b": at.normal(t, 2), "a_log": at.normal(2)}
    leaves |= {"dt": at.normal(2), "z": at.normal(t, 2, e), "gain": at.normal(e)}
    mixed = rk.causal_conv1d(leaves["x"], leaves["weight"], cu)
    q, k, v = mixed.split([d, d, 2 * e], -1)
    g, beta = rk.delta_gates(leaves["a"], leaves["b"], leaves["a_log"], leaves["dt"])
    core = rk.gated_delta_rule(q[:, None], k[:, None], v.unflatten(-1, (2, e)), g, beta, cu)
    out = rk.gated_rms_norm(core, leaves["z"], leaves["gain"], 1e-6)
    outputs = {"mixed": mixed, "g": g, "beta": beta, "core": core, "out": out}
    return with_gradients(outputs, leaves)


def _embedding(at: Inputs, t: int, v: int, h: int) -> dict[str, Tensor]:
    leaves = {"weight": at.normal(v, h)}
    return with_gradients({"out": rk.embedding(at.integers(t, below=v), leaves["weight"])}, leaves)


def _logp(at: Inputs, t: int, v: int, temperature: float) -> dict[str, Tensor]:
    leaves = {"logits": at.normal(t, v, scale=6.0)}
    out = rk.logp(leaves["logits"], at.integers(t, below=v), temperature=temperature)
    return with_gradients({"out": out}, leaves)


def _sample(at: Inputs, t: int, v: int, settings: dict) -> dict[str, Tensor]:
    logits = at.normal(t, v, scale=6.0, grad=False)
    keys, positions = at.integers(t, below=1 << 40), at.integers(t, below=9999)
    result = rk.sample(logits, keys, positions, **settings, raw_logprobs=True)
    return {**result._asdict(), "kept_tokens": rk.kept_tokens(logits, **settings)}


def _linear_sample(at: Inputs, t: int, h: int, v: int, temperature: float) -> dict[str, Tensor]:
    hidden, weight = at.normal(t, h, grad=False), at.normal(v, h, scale=0.5, grad=False)
    where = at.integers(t, below=1 << 40), at.integers(t, below=9999)
    drawn = rk.linear_sample(hidden, weight, *where, temperature=temperature, raw_logprobs=True)
    return drawn._asdict()


def _attention(
    at: Inputs, lengths: tuple[int, ...], d: int, heads: tuple[int, int], options: dict
) -> dict[str, Tensor]:
    t, cu = sum(lengths), at.bounds(*lengths)
    leaves = {"q": at.normal(t, heads[0], d), "k": at.normal(t, heads[1], d)}
    leaves["v"] = at.normal(t, heads[1], d)
    out, lse = rk.attention(*leaves.values(), cu, cu, return_lse=True, **options)
    return with_gradients({"out": out, "lse": lse}, leaves)


def _paged(at: Inputs, contexts: tuple[int, ...], queries: int, d: int, page: int) -> dict:
    each = -(-max(contexts) // page)
    blocks = each * len(contexts)
    keys, values = (at.normal(blocks, page, 2, d, grad=False) for _ in range(2))
    table = torch.arange(blocks).flip(0).reshape(len(contexts), each).int().to(at.device)
    q = at.normal(queries * len(contexts), 8, d, grad=False)
    lens, cu = torch.tensor(contexts).to(at.device), at.bounds(*[queries] * len(contexts))
    options = {"cu_seqlens_q": cu, "return_lse": True}
    out, lse = rk.paged_attention(q, keys, values, table, lens, **options)
    near, _ = rk.paged_attention(q, keys, values, table, lens, window=100, **options)
    return {"out": out, "lse": lse, "window": near}


def _latent_attention(
    at: Inputs, lengths: tuple[int, ...], heads: int, latent: int, rotated: int
) -> dict[str, Tensor]:
    """And the same rows over a cache."""
    t, cu, how = sum(lengths), at.bounds(*lengths), {"latent": latent, "scale": 0.1}
    leaves = {"q": at.normal(t, heads, latent + rotated), "latents": at.normal(t, latent + rotated)}
    out, lse = rk.latent_attention(*leaves.values(), cu, cu, return_lse=True, **how)
    table = torch.arange(t, dtype=torch.int32, device=at.device)[None]
    cache, one = leaves["latents"].detach()[:, None], at.bounds(1)
    last = rk.paged_latent_attention(
        leaves["q"].detach()[-1:], cache, table[:, -lengths[-1] :], one[1:] * lengths[-1],
        cu_seqlens_q=one, **how,
    )  # fmt: skip
    return with_gradients({"out": out, "lse": lse}, leaves) | {"last": last}


def _write_kv_cache(at: Inputs, t: int, d: int) -> dict[str, Tensor]:
    k, v = (at.normal(t, 2, d, grad=False) for _ in range(2))
    caches = [torch.zeros(t, 4, 2, d, dtype=k.dtype, device=at.device) for _ in range(2)]
    slots = torch.arange(t).mul(7).remainder(4 * t).sub(1).to(at.device)  # the first is left out
    rk.write_kv_cache(k, v, *caches, slots)
    return {"k": caches[0], "v": caches[1]}


def _linear_logp(at: Inputs, t: int, v: int, h: int, options: dict) -> dict[str, Tensor]:
    leaves = {"hidden": at.normal(t, h), "weight": at.normal(v, h, scale=3.0 * h**-0.5)}
    leaves["bias"] = at.normal(v)
    target = torch.where(at.integers(t, below=9) == 0, -100, at.integers(t, below=v))
    outputs = rk.linear_logp(
        leaves["hidden"],
        leaves["weight"],
        target,
        bias=leaves["bias"],
        return_lse=True,
        return_entropy=True,
        token_ids=at.integers(t, 3, below=v),
        **options,
    )
    return with_gradients(
        dict(zip(("logp", "lse", "entropy", "ids"), outputs, strict=True)), leaves
    )


def _grpo(at: Inputs, b: int, length: int, v: int, h: int, loss_type: str) -> dict[str, Tensor]:
    leaves = {"hidden": at.normal(b, length, h)}
    leaves["weight"] = at.normal(v, h, scale=3.0 * h**-0.5)
    target = at.integers(b, length, below=v)
    old, reference = (at.normal(b, length, grad=False).float() - 5 for _ in range(2))
    advantages = rk.group_advantages(at.normal(b, grad=False).float(), b // 2)
    loss, metrics = rk.linear_grpo_loss(
        *leaves.values(),
        target,
        old,
        advantages,
        at.integers(b, length, below=7) > 0,
        ref_logp=reference,
        beta=0.04,
        loss_type=loss_type,
    )
    return with_gradients({"advantages": advantages, "loss": loss} | metrics, leaves)


def _experts(at: Inputs, t: int, e: int, k: int, h: int, normalize: bool) -> dict[str, Tensor]:
    """A sparse layer, and the losses on its logits."""
    leaves = {"x": at.normal(t, h), "router": at.normal(e, h, scale=3.0 * h**-0.5)}
    leaves["up"] = at.normal(e, 2 * h, h, scale=h**-0.5)
    leaves["down"] = at.normal(e, h, h, scale=h**-0.5)
    logits = rk.linear(leaves["x"], leaves["router"], out_dtype=torch.float32)
    shares, ids = rk.route(logits, k, normalize=normalize)
    groups = rk.group_by_expert(ids, e)
    both = rk.grouped_linear(leaves["x"], leaves["up"], groups)
    act = rk.swiglu(*both.chunk(2, -1))
    rows = rk.grouped_linear(act, leaves["down"], groups)
    out = rk.combine_experts(rows, shares, ids, e)
    balance, z = rk.load_balancing_loss(logits, ids), rk.router_z_loss(logits)
    outputs = {"out": out, "shares": shares, "rows": rows, "balance": balance, "z": z}
    return with_gradients(outputs, leaves) | {"ids": ids, "order": groups.order}


def _route_corrected(
    at: Inputs, t: int, e: int, k: int, groups: int, top_groups: int, normalize: bool
) -> dict[str, Tensor]:
    leaves = {"logits": at.normal(t, e, scale=2.0)}
    how = {"normalize": normalize, "groups": groups, "top_groups": top_groups, "scale": 2.5}
    correction = at.normal(e, scale=0.1, grad=False)
    shares, ids = rk.route_corrected(leaves["logits"], correction, k, **how)
    return with_gradients({"shares": shares}, leaves) | {"ids": ids}


def cases(device: str, full: bool) -> Iterator[tuple[str, Case]]:
    """(name, what gives its outputs) of every case; `full`: with those for a GPU's sizes."""

    def case(name: str, dtype: torch.dtype, run: Callable, *sizes: object) -> tuple[str, Case]:
        short = str(dtype).removeprefix("torch.")
        words = "-".join(str(s).replace(" ", "") for s in sizes)
        return f"{name}-{short}-{words}", lambda: run(Inputs(device, dtype), *sizes)

    for dtype in DTYPES:
        products = [(1, 64, 48), (7, 33, 100), (130, 96, 800)]
        if full and dtype in HALF:
            products += [(1, 6144, 1024), (16, 4096, 4096), (33, 1000, 1000), (64, 28672, 4096)]
            products += [(200, 6144, 4096), (512, 6144, 1024), (1000, 5003, 776), (300, 1024, 3072)]
            products += [(2048, 4096, 4096), (4096, 4096, 12288)]
        for m, n, k in products:
            for wide in (False, True):
                yield case("linear", dtype, _linear, m, n, k, wide)
        yield case("add_lora", dtype, _add_lora, 70, *((4096, 1024, 16) if full else (96, 100, 8)))
        for cast in ("hf", "vllm"):
            yield case("rms_norm", dtype, _rms_norm, 37, 4096 if full else 96, cast)
        options = ({}, {"interleaved": True}, {"rotary_dim": 32, "cos_sin_dtype": torch.bfloat16})
        for chosen in options:
            yield case("rope", dtype, _rope, 65, 64, chosen)
        yield case("swiglu", dtype, _swiglu, 33, 1001)
        for normalize in (True, False):
            sizes = (300, 64, 8, 512) if full else (33, 9, 3, 64)
            yield case("experts", dtype, _experts, *sizes, normalize)
        yield case("delta_net", dtype, _delta_net, (5, 0, 70), 24, 16)
        yield case("embedding", dtype, _embedding, 300, 50, 99)
        yield case("write_kv_cache", dtype, _write_kv_cache, 33, 64)
        for v in (17, 1000, *((151936,) if full else ())):
            yield case("logp", dtype, _logp, 9, v, 0.7)
            for settings in ({}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01}):
                yield case("sample", dtype, _sample, 9, v, settings)
            for temperature in (0.0, 0.7):
                yield case("linear_sample", dtype, _linear_sample, 9, 100, v, temperature)
        sequences = [(5, 0, 33)]
        if full:
            sequences = [(1500, 0, 700), (4096,)] if dtype in HALF else [(300, 77)]
        for lengths in sequences:
            yield case("attention", dtype, _attention, lengths, 64, (4, 2), {})
            yield case("attention", dtype, _attention, lengths, 64, (2, 2), {"causal": False})
            yield case("attention", dtype, _attention, lengths, 128, (8, 1), {"window": 40})
            yield case("attention", dtype, _attention, lengths, 128, (8, 2), {})
            yield case("attention", dtype, _attention, lengths, 80, (2, 2), {})
        widths = (128, 512, 64) if full else (3, 32, 8)
        yield case("latent_attention", dtype, _latent_attention, sequences[0], *widths)
        paged = [((3, 40, 17), 1, 64, 16), ((20, 40), 7, 128, 8)]
        if full:
            paged += [((4096, 1, 1500), 1, 128, 16), ((3000, 2049), 130, 64, 32)]
        for sizes in paged:
            yield case("paged_attention", dtype, _paged, *sizes)
        capped = {"softcap": 30.0, "logit_scale": 0.5, "temperature": 0.8}
        heads_of = [(9, 300, 40, {}), (9, 300, 40, capped), (20, 97, 800, {})]
        if full and dtype in HALF:
            heads_of += [(257, 32003, 1024, {"logit_dtype": dtype}), (1000, 50000, 1024, capped)]
            heads_of += [(4096, 32768, 2048, {})]
        for sizes in heads_of:
            yield case("linear_logp", dtype, _linear_logp, *sizes)
        losses = [(4, 6, 97, 40, "grpo"), (4, 6, 97, 40, "dapo")]
        if full and dtype in HALF:
            losses += [(4, 512, 32768, 1024, "dr_grpo"), (8, 100, 20001, 512, "grpo")]
        for sizes in losses:
            yield case("linear_grpo_loss", dtype, _grpo, *sizes)
    for groups, top_groups in ((1, 1), (8, 3)):  # a router's scores are float32
        for normalize in (True, False):
            sizes = (300, 160, 8) if full else (33, 24, 4)
            yield case(
                "route_corrected", torch.float32, _route_corrected, *sizes, groups, top_groups,
                normalize,
            )  # fmt: skip


def measure(device: str, full: bool, part: int = 0, parts: int = 1) -> dict[str, dict[str, str]]:
    """Case -> output -> digest, of every `parts`-th case."""
    digests = {}
    for name, run in itertools.islice(cases(device, full), part, None, parts):
        assert name not in digests, name
        digests[name] = {output: digest(x) for output, x in run().items()}
    return digests


def recorded(implementation: str) -> dict[str, dict[str, str]]:
    return json.loads(DIGESTS.read_text(encoding="utf-8"))[implementation]


def differences(digests: dict, expected: dict) -> list[str]:
    """`case: output` of every digest that is other, missing or new."""
    wrong = []
    for name in sorted(digests.keys() | expected.keys()):
        a, b = digests.get(name, {}), expected.get(name, {})
        wrong += [f"{name}: {o}" for o in sorted(a.keys() | b.keys()) if a.get(o) != b.get(o)]
    return wrong


def record(implementation: str, digests: dict[str, dict[str, str]]) -> None:
    """Writes them into the file, in place of what it says of `implementation`."""
    known = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.is_file() else {}
    text = json.dumps(known | {implementation: digests}, indent=0, sort_keys=True)
    DIGESTS.write_text(text + "\n", encoding="utf-8")
