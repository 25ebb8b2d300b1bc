"""Times latent attention (MLA) with absorbed weights: decode beside vLLM's own kernels, prefill and
training beside torch's attention over expanded keys and values. A rival that is not installed, or
that does not run here, is left out.

DeepSeek-V3's attention: 128 heads, latents of 512 features with 64 rotated ones, heads of 128
features without a rotation and of 128 in values, bf16. `rlk` is the attention over latents alone;
`layer` has the products with the absorbed weights around it.
"""

import functools
from collections.abc import Callable

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from rlk_kernels.integrations import profile
from timing import copies, event_ms, graphs_ms, rand

HEADS, LATENT, ROTATED, WIDTH, VALUES = 128, 512, 64, 128, 128
SCALE = (WIDTH + ROTATED) ** -0.5
CONTEXT, PAGE = 4096, 64
DECODE = (1, 32, 128)
"""Sequences of a step of decode, each with CONTEXT keys."""
PREFILL = ((1, 8192), (16, 1024))
"""Sequences, and the tokens of each."""
TRAINING = (2048, 8192)
"""The tokens of the sequence whose gradients are computed."""
HOW = {"latent": LATENT, "scale": SCALE}


def _weight(grad: bool = False) -> torch.Tensor:
    return rand(HEADS * (WIDTH + VALUES), LATENT, scale=LATENT**-0.5, grad=grad)


def bundled() -> dict[str, Callable[..., torch.Tensor]]:
    """Name -> vLLM's attention over latents in a step of decode, `(q, cache, table, lengths)`."""
    found: dict[str, Callable[..., torch.Tensor]] = {}
    try:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    except ImportError:
        pass
    else:

        def triton_mla(q, cache, table, lengths):
            splits = 4
            out = q.new_empty(*q.shape[:2], LATENT)
            lse = q.new_empty(q.shape[:2])
            parts = q.new_empty(*q.shape[:2], splits, LATENT + 1, dtype=torch.float32)
            keys = cache[:, :, None]
            one = torch.ones((), dtype=torch.float32, device="cuda")
            decode_attention_fwd(
                q, keys, keys[..., :LATENT], out, lse, table, lengths, parts, splits, SCALE, PAGE,
                k_scale=one, v_scale=one,
            )  # fmt: skip
            return out

        found["vllm triton"] = triton_mla
    try:
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        pass
    else:

        def flash_mla(q, cache, table, lengths):
            metadata, splits = get_mla_metadata(lengths, HEADS, 1)
            out, _ = flash_mla_with_kvcache(
                q[:, None], cache[:, :, None], table, lengths, LATENT, metadata, splits,
                softmax_scale=SCALE, causal=True,
            )  # fmt: skip
            return out

        found["vllm flashmla"] = flash_mla
    return found


def runs(name: str, call: Callable[[], object]) -> bool:
    """Whether a rival of another version or another device runs; says why not."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # of any kind: it is code of others
        print(f"bench: {name} does not run here: {error}", flush=True)
        return False
    return True


def _decode(sequences: int) -> dict[str, Callable[[], object]]:
    """name -> a call, on new tensors."""
    pages = CONTEXT // PAGE
    q, cache = rand(sequences, HEADS, LATENT + ROTATED), rand(sequences * pages, PAGE, 576)
    order = torch.randperm(sequences * pages, device="cuda", dtype=torch.int32)
    table = order.view(sequences, pages)
    lengths = torch.full((sequences,), CONTEXT, device="cuda", dtype=torch.int32)
    cu = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
    where = {"cu_seqlens_q": cu, **HOW}
    weight = profile.absorbed(_weight(), HEADS, WIDTH)
    plain = rand(sequences, HEADS, WIDTH)

    def layer():
        whole = profile.latent_queries(plain, q[..., LATENT:], weight)
        return profile.paged_latent_attention(whole, cache, weight, table, lengths, cu, SCALE)

    ours = functools.partial(rk.paged_latent_attention, q, cache, table, lengths, **where)
    calls = {"rlk": ours, "layer": layer}
    for name, rival in bundled().items():
        calls[name] = functools.partial(rival, q, cache, table, lengths)
    return calls


def decode(ceilings: dict) -> list[dict]:
    """Microseconds of a step of decode, and the share of the copy bandwidth of the keys that it
    has to read."""
    records = []
    for sequences in DECODE:
        read = sequences * CONTEXT * (LATENT + ROTATED) * 2
        made = [_decode(sequences) for _ in range(copies(read, most=4))]
        fit = [name for name, call in made[0].items() if runs(name, call)]
        ms = graphs_ms({name: [calls[name] for calls in made] for name in fit})
        records.append(
            {"sequences": sequences, "us": {name: 1e3 * of for name, of in ms.items()},
             "bandwidth_share": read / ms["rlk"] / 1e6 / ceilings["copy_gbs"]}
        )  # fmt: skip
        del made
        torch.cuda.empty_cache()
    return records


def _rows(tokens: int, grad: bool) -> tuple[torch.Tensor, ...]:
    """Queries without and with a rotation, latents, and the weight that expands them."""
    q, rotated = rand(tokens, HEADS, WIDTH, grad=grad), rand(tokens, HEADS, ROTATED, grad=grad)
    return q, rotated, rand(tokens, LATENT + ROTATED, grad=grad), _weight(grad)


def _absorbed(cu: torch.Tensor, q, rotated, latents, weight) -> torch.Tensor:
    parts = profile.absorbed(weight, HEADS, WIDTH)
    queries = profile.latent_queries(q, rotated, parts)
    return profile.latent_attention(queries, latents, parts, cu, cu, SCALE)


def _expanded(sequences: int, q, rotated, latents, weight) -> torch.Tensor:
    """What transformers computes: keys and values of every head, and torch's attention."""
    both = (latents[:, :LATENT] @ weight.T).view(-1, HEADS, WIDTH + VALUES)
    key = latents[:, None, LATENT:].expand(-1, HEADS, -1)
    q, k = torch.cat([q, rotated], -1), torch.cat([both[..., :WIDTH], key], -1)
    rows = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, both[..., WIDTH:]))
    out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=SCALE)
    return out.transpose(1, 2).flatten(0, 1)


def _bounds(sequences: int, length: int) -> torch.Tensor:
    return torch.arange(0, (sequences + 1) * length, length, device="cuda", dtype=torch.int32)


def prefill(ceilings: dict) -> list[dict]:
    """Milliseconds of whole sequences, without a gradient; TFLOP/s of the attention over
    latents."""
    records = []
    for sequences, length in PREFILL:
        x, cu = _rows(sequences * length, False), _bounds(sequences, length)
        q = rand(sequences * length, HEADS, LATENT + ROTATED)
        calls = {
            "rlk": lambda q=q, x=x, cu=cu: rk.latent_attention(q, x[2], cu, cu, **HOW),
            "layer": lambda x=x, cu=cu: _absorbed(cu, *x),
            "sdpa, expanded": lambda x=x, n=sequences: _expanded(n, *x),
        }
        with torch.no_grad():
            ms = {name: event_ms(call) for name, call in calls.items() if runs(name, call)}
        flops = sequences * length**2 * HEADS * (2 * LATENT + ROTATED)
        records.append(
            {"sequences": sequences, "tokens": length, "ms": ms, "tflops": flops / ms["rlk"] / 1e9}
        )
    return records


def training(ceilings: dict) -> list[dict]:
    """Milliseconds of a forward and its backward, of one sequence."""
    records = []
    for tokens in TRAINING:
        x, cu, do = _rows(tokens, True), _bounds(1, tokens), rand(tokens, HEADS, VALUES)
        calls = {
            "layer": lambda x=x, cu=cu, do=do: torch.autograd.grad(_absorbed(cu, *x), x, do),
            "sdpa, expanded": lambda x=x, do=do: torch.autograd.grad(_expanded(1, *x), x, do),
        }
        ms = {
            name: event_ms(call, repeat=5, inner=1)
            for name, call in calls.items()
            if runs(name, call)
        }
        records.append({"tokens": tokens, "ms": ms})
    return records
