"""Deterministic, batch-invariant operators of a transformer: the bits of a row do not depend on its
batch. `backend` chooses the implementation of a call and records it.

torch.autograd computes first-order gradients. Other ways to differentiate (torch.func.grad and jvp,
forward mode, gradients of gradients) raise NotImplementedError."""

from collections.abc import Collection, Iterable

import torch

from rlk_kernels.backend import (
    backend_calls,
    choose,
    last_backend,
    reset_backend_calls,
)
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.device import HAS_TRITON
from rlk_kernels.errors import (
    KernelError,
    KernelFailed,
    UnknownBackend,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
)
from rlk_kernels.losses.linear_grpo.operator import linear_grpo_loss
from rlk_kernels.losses.policy.advantages import group_advantages
from rlk_kernels.losses.policy.operator import dpo_loss, linear_policy_loss, policy_loss
from rlk_kernels.losses.routing.operator import load_balancing_loss, router_z_loss
from rlk_kernels.ops.activation.operator import activation
from rlk_kernels.ops.attention.ahead import warm_up_paged_attention
from rlk_kernels.ops.attention.operator import attention, paged_attention, paged_schedule
from rlk_kernels.ops.attention.shared_schedule import Schedule
from rlk_kernels.ops.causal_conv.operator import cached_causal_conv1d, causal_conv1d
from rlk_kernels.ops.clamped_swiglu.operator import clamped_swiglu
from rlk_kernels.ops.combine.operator import combine_experts
from rlk_kernels.ops.delta_gates.operator import delta_gates
from rlk_kernels.ops.delta_rule.operator import cached_gated_delta_rule, gated_delta_rule
from rlk_kernels.ops.embedding.operator import embedding
from rlk_kernels.ops.experts.ahead import warm_up_experts
from rlk_kernels.ops.experts.operator import (
    ExpertGroups,
    group_by_expert,
    grouped_linear,
    grouped_swiglu,
)
from rlk_kernels.ops.gated_norm.operator import gated_rms_norm
from rlk_kernels.ops.head_linear.operator import head_linear
from rlk_kernels.ops.kv_cache.operator import write_kv_cache
from rlk_kernels.ops.latent_attention.ahead import warm_up_paged_latent_attention
from rlk_kernels.ops.latent_attention.operator import latent_attention, paged_latent_attention
from rlk_kernels.ops.layer_norm.operator import layer_norm
from rlk_kernels.ops.linear import linear
from rlk_kernels.ops.linear_logp.operator import linear_logp
from rlk_kernels.ops.linear_sample.operator import linear_sample
from rlk_kernels.ops.logp.operator import logp
from rlk_kernels.ops.lora.operator import add_lora, lora_expand, lora_shrink
from rlk_kernels.ops.norm_add_norm.operator import norm_add_norm
from rlk_kernels.ops.norm_rope.operator import norm_rope
from rlk_kernels.ops.position_scale.operator import position_scale
from rlk_kernels.ops.rms_norm.operator import rms_norm
from rlk_kernels.ops.rope.operator import rope
from rlk_kernels.ops.routing.operator import route, route_corrected
from rlk_kernels.ops.sample.operator import Sampled, kept_tokens, sample
from rlk_kernels.ops.softcap.operator import softcap
from rlk_kernels.ops.swiglu.operator import swiglu


def warm_up(
    device: torch.device | str,
    *,
    linears: Iterable[tuple[torch.Tensor, torch.Tensor | None]] = (),
    rows: Collection[int] = (),
    out_dtype: torch.dtype | None = None,
    wait: bool = True,
) -> bool:
    """Runs the self-check of tiles on a GPU, once per process; call it before capturing CUDA
    graphs. Also compiles, several at a time, the kernels that `linear` will launch without
    gradients for x[M, K] with each (weight, bias) of `linears`, each M of `rows` and this
    `out_dtype`.

    Returns True if all tiles give the same bits, so that all are in use, and if there is no Triton
    and nothing to check. Without `wait`, the function checks nothing and returns True: threads
    compile the kernels of `linears` and of the check, a launch waits for its own kernel, and the
    first product runs the check.
    """
    there = torch.empty(0, device=device)
    if not HAS_TRITON:
        return True
    from rlk_kernels.matmul.product import compile_ahead
    from rlk_kernels.matmul.self_check import tiles_agree

    with on_device_of(there):
        sound = not wait or all([tiles_agree(there.device), tiles_agree(there.device, split=True)])
        for weight, bias in linears:
            if choose("linear", None, weight) == "triton":
                compile_ahead(weight, bias, rows, out_dtype, wait)
    return sound


__all__ = [
    "ExpertGroups",
    "KernelError",
    "KernelFailed",
    "Sampled",
    "Schedule",
    "UnknownBackend",
    "UnsupportedDevice",
    "UnsupportedDtype",
    "UnsupportedShape",
    "activation",
    "add_lora",
    "attention",
    "backend_calls",
    "cached_causal_conv1d",
    "cached_gated_delta_rule",
    "causal_conv1d",
    "clamped_swiglu",
    "combine_experts",
    "delta_gates",
    "dpo_loss",
    "embedding",
    "gated_delta_rule",
    "gated_rms_norm",
    "group_advantages",
    "group_by_expert",
    "grouped_linear",
    "grouped_swiglu",
    "head_linear",
    "kept_tokens",
    "last_backend",
    "latent_attention",
    "layer_norm",
    "linear",
    "linear_grpo_loss",
    "linear_logp",
    "linear_policy_loss",
    "linear_sample",
    "load_balancing_loss",
    "logp",
    "lora_expand",
    "lora_shrink",
    "norm_add_norm",
    "norm_rope",
    "paged_attention",
    "paged_latent_attention",
    "paged_schedule",
    "policy_loss",
    "position_scale",
    "reset_backend_calls",
    "rms_norm",
    "rope",
    "route",
    "route_corrected",
    "router_z_loss",
    "sample",
    "softcap",
    "swiglu",
    "warm_up",
    "warm_up_experts",
    "warm_up_paged_attention",
    "warm_up_paged_latent_attention",
    "write_kv_cache",
]
