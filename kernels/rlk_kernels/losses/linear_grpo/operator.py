"""linear_grpo_loss: the GRPO or PPO loss of a step from hidden states, with its gradients.

    logp = linear_logp(hidden, weight, target)        loss and metrics of logp: `losses/policy`

triton backend (`launch.py`): three products instead of four, by chunks of tokens. torch backend:
the portable forward and backward of `linear_logp` (four products), with the same contract.

The forward computes the gradients for an upstream gradient of 1. The backward multiplies them in
place by the actual upstream gradient, so a second backward raises. Compiled code multiplies copies.

T = tokens   V = vocabulary   H = hidden size   B = sequences
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import custom_op, on_device_of, refuse_transforms
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.losses.linear_grpo import portable
from rlk_kernels.losses.policy.advantages import by_sequence
from rlk_kernels.losses.policy.objective import (
    METRICS,
    Objective,
    check_numbers,
    check_objective,
    pair_of,
)
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.linear_logp.operator import as_rows, check
from rlk_kernels.ops.linear_logp.options import check_options, options_of

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "ppo")
"""The loss types of `losses/policy` that are sums of functions of one token's log-prob."""


_on_triton = lazy_module("rlk_kernels.losses.linear_grpo.launch")


def _implementation(backend: str) -> ModuleType:
    return portable if backend == "torch" else _on_triton()


def _run(
    hidden, weight, bias, ids, tokens, spec, objective, backend, needs
) -> tuple[tuple, list[Tensor | None]]:
    """((loss, logp, names of the metrics, *metrics), gradients); tokens: old_logp, advantages,
    ref_logp, weights."""
    module, operands = _implementation(backend), (hidden, weight, bias, ids)
    grads: list[Tensor | None] = [None, None, None]
    if any(needs):
        logp, grads, ran = module.logp_and_gradients(*operands, tokens, spec, objective, needs)
    else:
        logp, ran = module.logp_alone(*operands, spec)
    record("linear_grpo_loss", ran)
    old, advantages, ref, weights = tokens
    value, metrics = module.reduce_loss(logp, old, advantages, weights, ref, objective)
    wide = wide_dtype(hidden.dtype)
    return (value.to(wide), logp, list(metrics), *metrics.values()), grads


class _LinearGRPO(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, tokens, spec, objective, backend, grad_enabled):
        ctx.backend, ctx.used = backend, False
        needs = [grad_enabled and bool(x) for x in ctx.needs_input_grad[:3]]
        outputs, ctx.grads = _run(
            hidden, weight, bias, ids, tokens, spec, objective, backend, needs
        )
        ctx.mark_non_differentiable(outputs[1], *outputs[3:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, g, *_):
        if g is None:
            return (None,) * 9
        if ctx.used:
            raise RuntimeError(
                "linear_grpo_loss: the gradients are computed once, in the forward; for a second "
                "backward, call it again"
            )
        ctx.used = True
        grads, ctx.grads = ctx.grads, None
        scale = _implementation(ctx.backend).scale
        for i, x in enumerate(grads):
            if x is not None and x.numel() > 0:
                grads[i] = scale(x, g)
        return (*grads, *(None,) * 6)


def _fake_prepare(target, mask, advantages, spread, *rest):
    t = target.shape[0]
    dtype = advantages.dtype
    if spread and rest[-1] != "torch":
        dtype = wide_dtype(dtype)
    return (
        target.new_empty(t, dtype=torch.int64), advantages.new_empty(t, dtype=dtype),
        target.new_empty(t, dtype=torch.float64),
    )  # fmt: skip


@custom_op("grpo_prepare", _fake_prepare)
def _prepare(
    target: Tensor, mask: Tensor, advantages: Tensor, spread: bool, cu_seqlens: Tensor | None,
    sequences: int, loss_type: str, max_tokens: int | None, ignore_index: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ids, token_advantages, weights = _implementation(backend).prepare(
        target, mask, advantages, spread, cu_seqlens, sequences, loss_type, max_tokens, ignore_index
    )
    # a copy where it is an input: a custom operator may not return its inputs
    return ids, token_advantages if spread else token_advantages.clone(), weights


def _fake_loss(hidden, weight, bias, ids, old, advantages, ref, weights, *options):
    needs = options[-2]
    wide = wide_dtype(hidden.dtype)
    count = len(METRICS) if ref is not None else len(METRICS) - 1
    grads = [
        x.new_empty(x.shape) if need and x is not None else hidden.new_empty(0)
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    ]
    return (
        hidden.new_empty((), dtype=wide), hidden.new_empty(hidden.shape[0], dtype=wide),
        hidden.new_empty(count, dtype=torch.float32), *grads,
    )  # fmt: skip


def _setup_compiled(ctx, inputs, output):
    ctx.needs = inputs[15]
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_compiled(ctx, g, *_):
    grads = [
        (x.to(g.dtype) * g).to(x.dtype) if need else None
        for x, need in zip(ctx.saved_tensors, ctx.needs, strict=True)
    ]
    return (*grads, *(None,) * 14)


@custom_op("linear_grpo_loss", _fake_loss, setup=_setup_compiled, backward=_backward_compiled)
def _compiled_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, old: Tensor | None,
    advantages: Tensor, ref: Tensor | None, weights: Tensor, logit_dtype: torch.dtype,
    softcap: float, scale: float, temperature: float, beta: float, low: float, high: float,
    needs: list[bool], backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, logp, metrics, dhidden, dweight, dbias): `_LinearGRPO` for a compiler, which needs all
    tensors of the backward among the outputs."""
    spec = options_of(logit_dtype, softcap, scale, temperature)
    objective, tokens = Objective("grpo", low, high, beta=beta), (old, advantages, ref, weights)
    (value, logp, _, *metrics), grads = _run(
        hidden, weight, bias, ids, tokens, spec, objective, backend, needs
    )
    gradients = [hidden.new_empty(0) if x is None else x for x in grads]
    return value, logp.clone(), torch.stack(metrics), *gradients


def _partition(cu_seqlens: Tensor, t: int) -> bool:
    """Whether the sequences contain each token exactly once. This is not checked on a GPU, where
    reading the bounds would synchronise, nor in compiled code, which cannot read them."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 + (t > 0):
        return False
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        return False
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    bounds = cu_seqlens.tolist()
    return bounds[0] == 0 and bounds[-1] == t and sorted(bounds) == bounds


def _check_tables(name: str, sequences: int, length: int, *tables: Tensor | None) -> None:
    """Raise if target, mask, advantages, old_logp or ref_logp has several dimensions and is not
    [B, L]: flattened, its numbers would belong to the wrong tokens."""
    names = ("target", "mask", "advantages", "old_logp", "ref_logp")
    for what, x in zip(names, tables, strict=True):
        if x is not None and x.dim() > 1 and x.shape != (sequences, length):
            raise UnsupportedShape(
                f"{name}: {what} {tuple(x.shape)} does not fit hidden[{sequences}, {length}, H]"
            )


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
    loss_type: str = "grpo",
    max_tokens: int | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    logit_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (a float32 scalar, differentiable in hidden, weight and bias) and the metrics.

    Padded: hidden[B, L, H] with target, mask, old_logp and ref_logp [B, L]. Packed: hidden[T, H]
    with target, mask, old_logp and ref_logp [T], and cu_seqlens[B + 1] from 0 to T (checked on the
    CPU; on a GPU a token outside every sequence gets NaN). advantages: [B], one for each sequence,
    or one for each token. mask: 1 for the tokens that count; a token whose target is ignore_index
    or negative is masked out (it has logp 0 and no gradient). old_logp None: the policy's own
    log-probabilities (ratio 1). beta above 0 needs ref_logp. loss_type: one of LOSS_TYPES; dr_grpo
    uses max_tokens (default L; required for packed input). The other arguments are those of
    `linear_logp`, and the metric `logp` [T] has the bits of its result.

    metrics: detached tensors, `logp` and the scalars of METRICS.
    Raises UnsupportedShape, UnsupportedDtype, ValueError, and what `backend.choose` raises.
    """
    name = "linear_grpo_loss"
    low, high = pair_of(name, "clip", clip)
    objective = Objective(loss_type, low, high, beta=float(beta))
    if hidden.dim() == 3:
        sequences, length, _ = hidden.shape
        _check_tables(name, sequences, length, target, mask, advantages, old_logp, ref_logp)
        cu_seqlens = None
        max_tokens = length if max_tokens is None else max_tokens
        hidden = hidden.flatten(0, 1)
    elif cu_seqlens is None:
        raise UnsupportedShape(f"{name}: packed hidden[T, H] needs cu_seqlens[B + 1]")
    elif not _partition(cu_seqlens, target.numel()):
        raise UnsupportedShape(
            f"{name}: cu_seqlens must be integers (int32, int64) that rise from 0 to the "
            f"{target.numel()} tokens, not {cu_seqlens}"
        )
    else:
        sequences = cu_seqlens.shape[0] - 1
    max_tokens = None if max_tokens is None else int(max_tokens)
    check_objective(name, objective, LOSS_TYPES, max_tokens, None, ref_logp)
    target, mask = target.flatten(), mask.flatten()
    check(name, hidden, weight, target, bias)
    spec = check_options(name, temperature, softcap, logit_scale, logit_dtype)
    per_token = {"mask": mask}
    spread = by_sequence(advantages, sequences)
    if not spread:
        advantages = per_token["advantages"] = advantages.flatten()
    for what, x in (("old_logp", old_logp), ("ref_logp", ref_logp)):
        if x is not None:
            per_token[what] = x.detach().flatten().contiguous()
    for what, x in per_token.items():
        if x.shape[0] != target.shape[0]:
            raise UnsupportedShape(
                f"{name}: {what} has {x.shape[0]} numbers for {target.shape[0]} tokens"
            )
    check_numbers(name, per_token | {"advantages": advantages})
    chosen = choose(
        name, backend, hidden, weight, bias, target, cu_seqlens, advantages, *per_token.values()
    )
    compiling = torch.compiler.is_compiling()
    if not compiling:
        refuse_transforms(name, vmap=False)
    arguments = (
        target, mask, advantages.detach(), spread, cu_seqlens, sequences, loss_type, max_tokens,
        int(ignore_index),
    )  # fmt: skip
    if compiling:
        ids, advantages, weights = _prepare(*arguments, chosen)
    else:
        with on_device_of(hidden):
            ids, advantages, weights = _implementation(chosen).prepare(*arguments)
    operands = (as_rows(hidden), as_rows(weight), None if bias is None else bias.contiguous())
    tokens = (per_token.get("old_logp"), advantages, per_token.get("ref_logp"), weights)
    if compiling:
        needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in operands]
        value, logp, metrics, *_ = _compiled_loss(
            *operands, ids, *tokens, spec.logit_dtype, spec.softcap, spec.scale,
            spec.temperature, objective.beta, low, high, needs, chosen,
        )  # fmt: skip
        values = metrics.unbind()
        names = METRICS[: len(values)]
    else:
        grad = torch.is_grad_enabled()
        inputs = (*operands, ids, tokens, spec, objective, chosen, grad)
        with on_device_of(hidden):
            if grad and any(x is not None and x.requires_grad for x in operands):
                value, logp, names, *values = _LinearGRPO.apply(*inputs)
            else:
                value, logp, names, *values = _run(*inputs[:-1], [False] * 3)[0]
    return value, {"logp": logp, **dict(zip(names, values, strict=True))}
