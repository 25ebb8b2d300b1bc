"""One small call of every public operator, for the tests of what all operators have in common.

T = tokens   H = hidden size   V = vocabulary   E = experts
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import rlk_kernels as rk
import torch
from torch import Tensor

T, H, V, E = 6, 16, 40, 5
ABOUT = {"backend_calls", "last_backend", "reset_backend_calls"} | {
    "warm_up", "warm_up_experts", "warm_up_paged_attention", "warm_up_paged_latent_attention"
}  # fmt: skip
"""The public functions that compute nothing."""
OPERATORS = {n for n in rk.__all__ if not isinstance(getattr(rk, n), type)} - ABOUT


@dataclass(frozen=True)
class Case:
    """A call of `operator`. The operator's tensors are positional arguments, or options."""

    operator: Callable[..., Any]
    tensors: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    writes: tuple[int | str, ...] = ()
    """The tensors that the operator writes to, by position or name."""
    gradient: bool = True
    """Whether the operator has a gradient."""
    compiled: bool = True
    """Whether torch.compile takes the operator into a graph."""
    dispatched: bool = True
    """Whether torch's dispatch knows the operator; else it is a function for autograd alone."""

    def arguments(self) -> dict[int | str, Any]:
        """All arguments, by position or name."""
        return {**dict(enumerate(self.tensors)), **self.options}

    def leaves(self) -> dict[int | str, Tensor]:
        """The floating-point inputs, by position or name, without those that are written to."""
        return {
            where: x
            for where, x in self.arguments().items()
            if torch.is_tensor(x) and x.is_floating_point() and where not in self.writes
        }

    def run(self, changed: dict[int | str, Any] | None = None, backend: str | None = None) -> Any:
        """The call, with other arguments where they are `changed`, and with copies of the tensors
        that it writes to."""
        arguments = self.arguments() | (changed or {})
        arguments |= {where: arguments[where].clone() for where in self.writes}
        named = {where: x for where, x in arguments.items() if isinstance(where, str)}
        if backend is not None and "backend" in inspect.signature(self.operator).parameters:
            named["backend"] = backend
        result = self.operator(*(arguments[i] for i in range(len(self.tensors))), **named)
        return [result, *(arguments[where] for where in self.writes)]


def tensors_of(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, in order."""
    if torch.is_tensor(result):
        yield result
        return
    if is_dataclass(result):
        result = [getattr(result, each.name) for each in fields(result)]
    elif isinstance(result, dict):
        result = result.values()
    for part in result if isinstance(result, Iterable) and not isinstance(result, str) else ():
        yield from tensors_of(part)


def differentiable(result: Any) -> list[Tensor]:
    return [x for x in tensors_of(result) if x.requires_grad]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)))


X, W, HEAD, GAIN = rand(T, H), rand(H, H, seed=1), rand(V, H, seed=2), rand(H, seed=3)
Q, K, LOGP = rand(T, 4, 8), rand(T, 2, 8, seed=4), rand(T, seed=5)
IDS, CU, ONES = torch.arange(T), torch.tensor([0, 4, T], dtype=torch.int32), torch.ones(T)
MASK = (IDS > 1).long()
CACHE = rand(3, 4, 2, 8, seed=6)
PAGED = (Q, CACHE, CACHE.flip(0), torch.tensor([[0, 1], [2, 0]]).int(), torch.tensor([7, 2]).int())
FREQUENCIES = {"inv_freq": rand(4, seed=7), "scaling": rand(1)}
CHOSEN = torch.tensor([[0, 3], [1, 2], [0, 4], [2, 3], [1, 4], [0, 1]], dtype=torch.int32)
GROUPS = rk.group_by_expert(CHOSEN, E, backend="torch")
EXPERTS, SHARES = rand(E, H, H), rand(T, 2, seed=8).softmax(-1)
VALUES, DECAYS = rand(T, 4, 8, seed=10), -rand(T, 4, seed=11).abs()
DELTA = (K, K.flip(0), VALUES, DECAYS, rand(T, 4, seed=12).sigmoid())
CHUNKS = (
    rand(3, 4, 8, 8), rand(3, 64, 2, 8), rand(3, 64, 4, 8), -rand(3, 64, 4).abs().cumsum(1)
)  # fmt: skip
CONTINUED = (torch.tensor([2, 0]).int(), torch.tensor([70, 3]).int(), CU)
"""Slots, the tokens before the new rows, and where sequences begin."""
ADAPTERS = (rand(2, 4, H, seed=14), rand(2, H, 4, seed=15))
SLOTS = {"scales": torch.tensor([2.0, 0.3]), "slots": torch.tensor([0, -1, 1, 2, 1, 0])}
POLICY = (LOGP - 0.1, rand(2, seed=9), MASK)
PACKED = {"cu_seqlens": CU, "ref_logp": LOGP + 0.1, "beta": 0.1}


def sparse_layer(x: Tensor, router: Tensor, weight: Tensor, backend: str | None = None) -> Tensor:
    shares, ids = rk.route(
        rk.linear(x, router, out_dtype=torch.float32, backend=backend), 2, backend=backend
    )
    groups = rk.group_by_expert(ids, E, backend=backend)
    rows = rk.grouped_linear(x, weight, groups, backend=backend)
    rows = rk.grouped_linear(rows, weight, groups, backend=backend)
    return rk.combine_experts(rows, shares, ids, E, backend=backend)


UNTRACED: Any = {"compiled": False, "dispatched": False}

CASES = {
    "linear": Case(rk.linear, (X, W, GAIN)),
    "linear, out": Case(
        rk.linear, (X, W), {"out": torch.zeros(T, H)}, writes=("out",), gradient=False
    ),
    "linear, main_grad": Case(
        rk.linear, (X, W), {"main_grad": torch.zeros(H, H)}, ("main_grad",), gradient=False
    ),
    "add_lora": Case(rk.add_lora, (X, W[:T].clone(), *ADAPTERS), SLOTS),
    "lora_shrink": Case(rk.lora_shrink, (X, ADAPTERS[0]), SLOTS),
    "lora_expand": Case(
        rk.lora_expand, (rand(T, 4, seed=16), W[:T].clone(), ADAPTERS[1]), SLOTS
    ),
    "add_lora, one": Case(
        rk.add_lora, (X, W[:T].clone(), *(x[:1].clone() for x in ADAPTERS)), {"scales": ONES[:1]}
    ),
    "add_lora, widths": Case(
        rk.add_lora,
        (X, W[:T].clone(), rand(2, 2, 4, H, seed=17), ADAPTERS[1]),
        SLOTS | {"scales": torch.tensor([[2.0, 0.3], [0.0, 1.5]]), "widths": (10, 6)},
    ),
    "rms_norm": Case(rk.rms_norm, (X, GAIN, 1e-6)),
    "rms_norm, residual": Case(rk.rms_norm, (X, GAIN, 1e-6), {"residual": W[:T].clone()}),
    "norm_add_norm": Case(
        rk.norm_add_norm, (X, W[:T].clone(), GAIN, GAIN.flip(0), 1e-6), gradient=False
    ),
    "rope": Case(rk.rope, (Q, K, IDS), {"theta": 1e4}),
    "rope, frequencies": Case(rk.rope, (Q, K, IDS), FREQUENCIES),
    "norm_rope": Case(
        rk.norm_rope, (Q, K, GAIN[:8].clone(), GAIN[8:].clone(), IDS), {"eps": 1e-6, **FREQUENCIES}
    ),
    "swiglu": Case(rk.swiglu, (X, W[:T].clone())),
    "swiglu, gelu": Case(rk.swiglu, (X, W[:T].clone()), {"activation": "gelu_tanh"}),
    "softcap": Case(rk.softcap, (X, 2.0)),
    "clamped_swiglu": Case(
        rk.clamped_swiglu, (X, W[:T].clone()), {"alpha": 1.702, "limit": 0.7}
    ),
    "activation": Case(rk.activation, (X, "relu2")),
    "activation, gelu": Case(rk.activation, (X, "gelu_tanh")),
    "layer_norm": Case(rk.layer_norm, (X, GAIN, 1e-6, GAIN.flip(0))),
    "position_scale": Case(
        rk.position_scale, (IDS,), {"beta": 0.1, "context": 2}, gradient=False
    ),
    "swiglu, sigmoid": Case(rk.swiglu, (X, W[:T].clone()), {"activation": "sigmoid"}),
    "gated_rms_norm": Case(rk.gated_rms_norm, (X, W[:T].clone(), GAIN, 1e-6)),
    "delta_gates": Case(rk.delta_gates, (X, W[:T].clone(), GAIN, GAIN.flip(0))),
    "causal_conv1d": Case(rk.causal_conv1d, (X, rand(H, 4, seed=13), CU)),
    "cached_causal_conv1d": Case(
        rk.cached_causal_conv1d, (X, rand(H, 4, seed=13), rand(3, 3, H), *CONTINUED), writes=(2,),
        gradient=False,
    ),
    "gated_delta_rule": Case(rk.gated_delta_rule, (*DELTA, CU)),
    "cached_gated_delta_rule": Case(
        rk.cached_gated_delta_rule, (*DELTA, *CHUNKS, *CONTINUED), writes=(5, 6, 7, 8),
        gradient=False,
    ),
    "embedding": Case(rk.embedding, (IDS, HEAD)),
    "write_kv_cache": Case(
        rk.write_kv_cache, (K, K.flip(0), CACHE, CACHE.flip(0), IDS), writes=(2, 3), gradient=False
    ),
    "attention": Case(rk.attention, (Q, K, K.flip(0), CU, CU.clone())),
    "attention, softcap": Case(
        rk.attention, (Q, K, K.flip(0), CU, CU.clone()), {"softcap": 5.0, "sinks": rand(4)}
    ),
    "paged_attention": Case(
        rk.paged_attention, PAGED, {"cu_seqlens_q": CU, "sinks": rand(4)}, gradient=False
    ),
    "paged_attention, out": Case(
        rk.paged_attention, PAGED, {"cu_seqlens_q": CU, "out": torch.zeros_like(Q)},
        writes=("out",), gradient=False,
    ),
    "paged_schedule": Case(
        rk.paged_schedule, PAGED, {"cu_seqlens_q": CU}, gradient=False, compiled=False
    ),
    "latent_attention": Case(
        rk.latent_attention, (Q, rand(T, 8, seed=17), CU, CU.clone()), {"latent": 6, "scale": 0.3}
    ),
    "paged_latent_attention": Case(
        rk.paged_latent_attention, (Q, rand(3, 4, 8, seed=18), *PAGED[3:]),
        {"cu_seqlens_q": CU, "latent": 6, "scale": 0.3}, gradient=False,
    ),
    "logp": Case(rk.logp, (X, IDS)),
    "logp, with the largest": Case(rk.logp, (X, IDS), {"token_ids": IDS[:, None], "top_k": 2}),
    "sample": Case(
        rk.sample, (X[:2].clone(), IDS[:2].clone(), IDS[2:4].clone()),
        {"temperature": ONES[:2].clone(), "top_p": ONES[:2] * 0.9, "raw_logprobs": True},
        gradient=False,
    ),
    "kept_tokens": Case(
        rk.kept_tokens, (X[:2].clone(),), {"temperature": ONES[:2].clone(), "top_k": 3},
        gradient=False,
    ),
    "linear_sample": Case(
        rk.linear_sample, (X[:2].clone(), HEAD, IDS[:2].clone(), IDS[2:4].clone()),
        {"bias": rand(V), "temperature": ONES[:2].clone(), "raw_logprobs": True}, gradient=False,
    ),
    "linear_logp": Case(rk.linear_logp, (X, HEAD, IDS)),
    "linear_logp, all outputs": Case(
        rk.linear_logp, (X, HEAD, IDS),
        {"bias": rand(V), "token_ids": IDS[:, None], "return_lse": True, "return_entropy": True},
    ),
    "linear_grpo_loss": Case(
        rk.linear_grpo_loss,
        (X[None], HEAD, IDS[None], LOGP[None] - 0.1, torch.ones(1), MASK[None]),
        {"ref_logp": LOGP[None] + 0.1, "beta": 0.1, "bias": rand(V)}, dispatched=False,
    ),
    "linear_grpo_loss, packed": Case(
        rk.linear_grpo_loss, (X, HEAD, IDS, None, IDS + 1.0, MASK), {"cu_seqlens": CU},
        dispatched=False,
    ),
    "group_advantages": Case(rk.group_advantages, (LOGP, 3), gradient=False),
    "route": Case(rk.route, (rand(T, E), 2)),
    "route_corrected": Case(
        rk.route_corrected, (X, GAIN, 2), {"groups": 4, "top_groups": 2, "scale": 2.5}
    ),
    "group_by_expert": Case(rk.group_by_expert, (CHOSEN, E), gradient=False),
    "grouped_linear": Case(rk.grouped_linear, (X, EXPERTS, GROUPS)),
    "grouped_linear, bias": Case(
        rk.grouped_linear, (X, EXPERTS, GROUPS, EXPERTS[:, 0].clone())
    ),
    "head_linear": Case(rk.head_linear, (rand(T, E, H), EXPERTS)),
    "head_linear, rest": Case(rk.head_linear, (rand(T, E, H), EXPERTS, rand(T, E, 3))),
    "grouped_swiglu": Case(rk.grouped_swiglu, (X, EXPERTS, GROUPS), gradient=False),
    "combine_experts": Case(rk.combine_experts, (rand(T, 2, H), SHARES, CHOSEN, E)),
    "combine_experts, a sparse layer": Case(sparse_layer, (X, HEAD[:E].clone(), EXPERTS)),
    # The losses below wait for the sequences' lengths, or have a backward in float64.
    "policy_loss": Case(rk.policy_loss, (LOGP, *POLICY), PACKED, **UNTRACED),
    "linear_policy_loss": Case(
        rk.linear_policy_loss, (X, HEAD, IDS, *POLICY), PACKED, **UNTRACED
    ),
    "dpo_loss": Case(rk.dpo_loss, (LOGP, LOGP - 0.1, MASK), {"cu_seqlens": CU}, **UNTRACED),
    "load_balancing_loss": Case(rk.load_balancing_loss, (rand(T, E), CHOSEN), **UNTRACED),
    "router_z_loss": Case(rk.router_z_loss, (rand(T, E),), **UNTRACED),
}  # fmt: skip
