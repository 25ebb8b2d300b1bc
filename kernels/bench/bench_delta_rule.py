"""Times the gated delta rule beside flash-linear-attention: decode and prefill beside the kernels
that vLLM bundles, and training beside the package fla. A rival that is not installed is left out.

16 heads of q and k, 32 of v, of 128 features, bf16.
"""

import functools

import rlk_kernels as rk
import torch
import torch.nn.functional as F
from rlk_kernels.ops.delta_rule.chunk import CHUNK
from timing import copies, event_ms, graphs_ms, rand

HEADS, VALUE_HEADS, DIM = 16, 32, 128
DECODE = (1, 32, 256)
"""Sequences of a step of decode."""
CONTEXT = 1000
"""The tokens of a sequence before the step: 40 of them are in the open chunk."""
PREFILL = ((1, 8192), (16, 1024))
"""Sequences, and the tokens of each."""
TOKENS = 8192
"""The tokens of the sequence whose gradients are computed."""


def bundled():
    """(the rule of whole sequences, the rule of a step of decode) that vLLM bundles, or None."""
    try:
        from vllm.third_party.flash_linear_attention import ops
    except ImportError:
        return None
    return ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule


def trained():
    """The rule with a gradient, of the package fla; None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def rows(t: int, grad: bool = False) -> list[torch.Tensor]:
    """q, k, v, g and beta of t rows."""
    q, k = (rand(t, HEADS, DIM, grad=grad) for _ in range(2))
    v, beta = rand(t, VALUE_HEADS, DIM, grad=grad), rand(t, VALUE_HEADS).sigmoid()
    g = -torch.rand(t, VALUE_HEADS, device="cuda") * 0.1
    return [q, k, v, g.requires_grad_(grad), beta.detach().requires_grad_(grad)]


def _decode(sequences: int) -> dict:
    """name -> a call, on new tensors."""
    x = rows(sequences)
    slots = torch.arange(sequences, device="cuda", dtype=torch.int32)
    cu = torch.arange(sequences + 1, device="cuda", dtype=torch.int32)
    context = torch.full_like(slots, CONTEXT)
    state = torch.randn(sequences + 1, VALUE_HEADS, DIM, DIM, device="cuda")
    cache = [
        state, F.normalize(rand(sequences + 1, CHUNK, HEADS, DIM), dim=-1),
        rand(sequences + 1, CHUNK, VALUE_HEADS, DIM),
        -torch.rand(sequences + 1, CHUNK, VALUE_HEADS, device="cuda").cumsum(1) * 0.1,
    ]  # fmt: skip
    calls = {
        "rlk": functools.partial(rk.cached_gated_delta_rule, *x, *cache, slots, context, cu),
    }
    if rival := bundled():
        calls["fla"] = functools.partial(
            rival[1], *(part[None] for part in x), initial_state=state.clone(),
            inplace_final_state=True, cu_seqlens=cu, ssm_state_indices=slots + 1,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    return calls


def decode(ceilings: dict) -> list[dict]:
    """Microseconds of a step of decode, and the share of the copy bandwidth of what it has to
    read: the state, and the rows of the open chunk."""
    records = []
    held = CONTEXT % CHUNK
    for sequences in DECODE:
        read = 4 * VALUE_HEADS * DIM * DIM + 2 * held * (HEADS + VALUE_HEADS) * DIM
        made = [_decode(sequences) for _ in range(copies(sequences * read, most=8))]
        ms = graphs_ms({name: [calls[name] for calls in made] for name in made[0]})
        records.append(
            {"sequences": sequences, "us": {name: 1e3 * of for name, of in ms.items()},
             "bandwidth_share": sequences * read / ms["rlk"] / 1e6 / ceilings["copy_gbs"],
             **_ratio(ms)}
        )  # fmt: skip
        del made
        torch.cuda.empty_cache()
    return records


def _ratio(ms: dict[str, float]) -> dict[str, float]:
    """The rival's time divided by that of rlk, where there is a rival."""
    return {"fla_ratio": ms["fla"] / ms["rlk"]} if "fla" in ms else {}


def prefill(ceilings: dict) -> list[dict]:
    """Milliseconds of whole sequences, without a gradient."""
    records = []
    for sequences, length in PREFILL:
        x = rows(sequences * length)
        cu = torch.arange(0, (sequences + 1) * length, length, device="cuda", dtype=torch.int32)
        calls = {"rlk": functools.partial(rk.gated_delta_rule, *x, cu)}
        if rival := bundled():
            dense = [part.unflatten(0, (sequences, length)) for part in x]
            calls["fla"] = functools.partial(rival[0], *dense, use_qk_l2norm_in_kernel=True)
        with torch.no_grad():
            ms = {name: event_ms(call) for name, call in calls.items()}
        records.append({"sequences": sequences, "tokens": length, "ms": ms, **_ratio(ms)})
    return records


def training(ceilings: dict) -> list[dict]:
    """Milliseconds of a forward and its backward, of one sequence. fla wants as many heads of q and
    k as of v, so these are repeated for it, as transformers does."""
    x = rows(TOKENS, grad=True)
    cu = torch.tensor([0, TOKENS], device="cuda", dtype=torch.int32)
    do = rand(TOKENS, VALUE_HEADS, DIM)
    calls = {"rlk": lambda: torch.autograd.grad(rk.gated_delta_rule(*x, cu), x, do)}
    if (rule := trained()) is not None:

        def fla():
            q, k = (part.repeat_interleave(VALUE_HEADS // HEADS, 1)[None] for part in x[:2])
            rest = (part[None] for part in x[2:])
            out, _ = rule(q, k, *rest, use_qk_l2norm_in_kernel=True)
            return torch.autograd.grad(out, x, do[None])

        calls["fla"] = fla
    ms = {name: event_ms(call, repeat=5, inner=2) for name, call in calls.items()}
    return [{"tokens": TOKENS, "ms": ms, **_ratio(ms)}]
