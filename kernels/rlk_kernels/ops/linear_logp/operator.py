"""linear_logp: log-probability of a token from the hidden state, without logits in memory.

    x[v]  = round( sum_h hidden[t, h] weight[v, h] + bias[v] )            fp32, then logit_dtype
    z[v]  = (softcap tanh(x[v] / softcap)) logit_scale / temperature      fp32, each step rounded
    lse   = log sum_v exp(z[v])          logp = z[target] - lse
    entropy = lse - sum_v p[v] z[v]      p[v] = exp(z[v] - lse)

Reduction order: the sum over h is in the order of `linear`, and the sum over v in the tree of
`numerics/lse_tree`. So `linear_logp(h, w, t, logit_dtype=D)` equals
`logp(linear(h, w, out_dtype=D), t)` bit for bit on either backend, and a row's results depend only
on that row, weight and bias.

Gradients (g: the upstream gradients of logp[t], lse, entropy and the log-probs of token_ids):
    dx[v] = dz/dx ( sum_j g_j ([v == id_j] - p[v]) + g_lse p[v]
                    - g_entropy p[v] (log p[v] + entropy) )
in fp32, rounded once to the operands' dtype. At an id, 1 - p is computed in fp32, so that confident
tokens keep their digits. Then
    dhidden[t, h] = sum_v dx[t, v] weight[v, h]    fp32, v from front to back, row by row
    dweight[v, h] = sum_t dx[t, v] hidden[t, h]    fp32, t from front to back, no atomics
    dbias[v] = sum_t dx[t, v]                      the fixed order of `column_sum`
Tiles of logits are recomputed, never stored. Memory: see `launch.py`. A token whose upstream
gradients are all 0, such as an ignored token, adds nothing to any gradient, even if it has NaN.

T = tokens   V = vocabulary   H = hidden size   K = further ids of each token
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.linear import check_weight
from rlk_kernels.ops.linear_logp import portable
from rlk_kernels.ops.linear_logp.options import (
    RowStatistics,
    check_options,
    check_token_ids,
    options_of,
)


def linear_logp_ref(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(logp, lse, entropy) by the formula in float64, for tests; a negative target gives 0."""
    x = hidden.double() @ weight.double().mT
    if bias is not None:
        x = x + bias.double()
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    z = x * logit_scale / temperature
    logs = torch.log_softmax(z, -1)
    logp = logs.gather(-1, target.long().clamp(min=0)[:, None]).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return torch.where(target < 0, 0.0, logp), torch.logsumexp(z, -1), entropy


_on_triton = lazy_module("rlk_kernels.ops.linear_logp.launch")


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, logit_dtype: torch.dtype,
    softcap: float, scale: float, temperature: float, entropy: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`RowStatistics`: logp, lse, entropy, and (n, log_s, z) for the gradient."""
    spec = options_of(logit_dtype, softcap, scale, temperature)
    if backend == "torch":
        rows, ran = portable.forward(hidden, weight, bias, ids, spec, entropy), "torch"
    else:
        rows, ran = _on_triton().forward(hidden, weight, bias, ids, spec, entropy)
    record("linear_logp", ran)
    return tuple(rows)


def _inference(
    count: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor,
    logit_dtype: torch.dtype, softcap: float, scale: float, temperature: float, entropy: bool,
    backend: str,
) -> Sequence[Tensor | None]:  # fmt: skip
    """`_run` without a backward: the first `count` of logp, lse and entropy."""
    if backend == "torch":
        return _run(
            hidden, weight, bias, ids, logit_dtype, softcap, scale, temperature, entropy, backend
        )
    spec = options_of(logit_dtype, softcap, scale, temperature)
    results, ran = _on_triton().forward_inference(hidden, weight, bias, ids, spec, entropy, count)
    record("linear_logp", ran)
    return *results, None, None


def _fake(hidden, weight, bias, ids, logit_dtype, softcap, scale, temperature, entropy, backend):
    wide = wide_dtype(hidden.dtype)
    inner = torch.float64 if backend == "torch" else torch.float32
    t = hidden.shape[0]
    shapes = [(ids.shape, wide), ((t,), wide), ((t if entropy else 0,), wide)]
    shapes += [((t,), inner), ((t,), inner), (ids.shape, inner)]
    return tuple(hidden.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _fake_backward(hidden, weight, bias, *rest):
    needs = rest[-2]
    return tuple(
        x.new_empty(x.shape) if need and x is not None else hidden.new_empty(0)
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    )


@custom_op("linear_logp_backward", _fake_backward, no_gradient=("linear_logp", SECOND))
def _linear_logp_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, entropy: Tensor, n: Tensor,
    log_s: Tensor, z: Tensor, g: Tensor, g_lse: Tensor | None, g_entropy: Tensor | None,
    logit_dtype: torch.dtype, softcap: float, scale: float, temperature: float, needs: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    spec = options_of(logit_dtype, softcap, scale, temperature)
    if ids.dim() == 1:
        ids, z, g = ids[:, None], z[:, None], g[:, None]
    rows = RowStatistics(z, n, entropy, n, log_s, z)
    arguments = (hidden, weight, bias, ids, rows, g, g_lse, g_entropy, spec, needs)
    if backend == "torch":
        grads, ran = portable.backward(*arguments), "torch"
    else:
        grads, ran = _on_triton().backward(*arguments)
    record("linear_logp_backward", ran)
    dh, dw, db = (hidden.new_empty(0) if x is None else x for x in grads)
    return dh, dw, db if bias is None or not needs[2] else db.to(bias.dtype)


def _setup(ctx, inputs, output):
    hidden, weight, bias, ids, *options, _, ctx.backend = inputs
    ctx.options = options
    _, _, entropy, n, log_s, z = output
    ctx.save_for_backward(hidden, weight, bias, ids, entropy, n, log_s, z)
    ctx.mark_non_differentiable(n, log_s, z)
    ctx.set_materialize_grads(False)


def _backward(ctx, g, g_lse, g_entropy, _n, _log_s, _z):
    hidden, _, _, ids, entropy, *_ = ctx.saved_tensors
    if g is None and g_lse is None and g_entropy is None:
        return (None,) * 10
    needs = [bool(x) for x in ctx.needs_input_grad[:3]]
    if g is None:
        g = torch.zeros(ids.shape, dtype=torch.float32, device=hidden.device)
    if entropy.numel() == 0:
        g_entropy = None
    grads = _linear_logp_backward(
        *ctx.saved_tensors, g.contiguous(), g_lse, g_entropy, *ctx.options, needs, ctx.backend
    )
    results = [x if need else None for x, need in zip(grads, needs, strict=True)]
    return (*results, *(None,) * 7)


_linear_logp = custom_op("linear_logp", _fake, setup=_setup, backward=_backward)(_run)


def check(name: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raise UnsupportedShape or UnsupportedDtype if the operands do not fit."""
    of_hidden, of_weight = hidden.shape, weight.shape
    fits = len(of_hidden) == len(of_weight) == 2 and of_hidden[1] == of_weight[1]
    if not fits or target.shape != (of_hidden[0],) or of_weight[0] == 0:
        raise UnsupportedShape(
            f"{name}: hidden[T, H], weight[V, H] and target[T] are needed, not "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}"
        )
    check_weight(name, "hidden", hidden, weight, bias)
    if target.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"{name}: target is {target.dtype}; int32 or int64 is needed")


def as_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    logit_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_entropy: bool = False,
    token_ids: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """log softmax(z)[t, target[t]] -> [T] float32, z the logits of hidden and weight (see above).

    hidden[T, H], weight[V, H]: one dtype of bfloat16, float16, float32 (float64 on the torch
    backend, with logits in float64); bias[V]: that dtype or float32; target[T], token_ids[T, K]:
    int32 or int64 below V. A target of ignore_index, or any negative id, gives 0 and no gradient.
    logit_dtype: float32, bfloat16 or float16, to which the logits are rounded first.

    With return_lse, return_entropy or token_ids the result is a tuple of logp[T] and the requested
    ones of lse[T], entropy[T] and the log-probabilities [T, K] of token_ids, in this order. All are
    float32 and differentiable in hidden, weight and bias; without gradients they share memory.

    An id of V or more raises IndexError on the torch backend and gives NaN on the GPU.
    Raises UnsupportedShape, UnsupportedDtype, ValueError, and what `backend.choose` raises.
    """
    check("linear_logp", hidden, weight, target, bias)
    spec = check_options("linear_logp", temperature, softcap, logit_scale, logit_dtype)
    chosen = choose("linear_logp", backend, hidden, weight, target, bias, token_ids)
    ids = target if target.dtype == torch.int64 else target.long()
    if ignore_index >= 0:  # a negative ignore_index is ignored like every negative id
        ids = torch.where(ids == ignore_index, -1, ids)
    if token_ids is not None:
        check_token_ids("linear_logp", token_ids, target.shape[0])
        ids = torch.cat([ids.unsqueeze(1), token_ids.long()], 1)
    count = 3 if return_entropy else 2 if return_lse else 1
    logps, lse, entropy, *_ = call(
        _linear_logp,
        as_rows(hidden), as_rows(weight), None if bias is None else bias.contiguous(),
        ids.contiguous(), spec.logit_dtype, spec.softcap, spec.scale, spec.temperature,
        return_entropy, chosen, inference=functools.partial(_inference, count),
    )  # fmt: skip
    results = [logps if token_ids is None else logps[:, 0]]
    results += [lse] if return_lse else []
    results += [entropy] if return_entropy else []
    results += [logps[:, 1:]] if token_ids is not None else []
    return results[0] if len(results) == 1 else tuple(results)
