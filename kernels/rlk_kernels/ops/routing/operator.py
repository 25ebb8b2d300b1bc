"""route: the k experts of each token, and their weights.

    chosen[t]     = the k largest of logits[t], ties to the lowest id; in ascending id
    weights[t, j] = exp(l_j - m) / sum_i exp(l_i - m)       normalize; m: the largest of these
    weights[t, j] = exp(l_j) / sum_e exp(l_e)               otherwise: over all experts

Order: the sum over the chosen is computed in fp32, one by one in ascending id; the sum over all
experts by the tree of `numerics/lse_tree`. A row depends only on its own logits. -0 and +0 are
equal; a NaN counts as larger than any number, and all weights of its row are NaN.

Gradients, with g the gradient of the weights and s = sum_j weights[j] g[j]:
    dlogits[e] = weights[j] (g[j] - s)   for the j-th of the chosen, 0 for the others   (normalize)
    dlogits[e] = p[e] (g[j] - s)         g = 0 for experts not chosen, p = softmax(logits)

route_corrected: the k experts of each token, by corrected scores, and their weights.

    s[t, e]       = 1 / (1 + exp(-logits[t, e]))
    c[t, e]       = s[t, e] + correction[e]
    groups        : E / groups consecutive experts each; the score of a group is the sum of its two
                    largest c, and the top_groups best are chosen, ties to the lowest
    chosen[t]     = the k largest c[t] in these groups, ties to the lowest id; in ascending id
    weights[t, j] = scale * (s_j / (sum_i s_i + 1e-20))                                  normalize
    weights[t, j] = scale * s_j                                                          otherwise

This is the choice of DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) and GLM-4.5. Order: sums are
computed in fp32, over the chosen one by one in ascending id, then 1e-20 is added. A row depends
only on its own logits. -0 and +0 are equal; a NaN is larger than any number.

Gradients, with g the gradient of the weights, S the sum over the chosen and m = sum_j g_j s_j / S:
    dlogits[e] = scale * s_j (1 - s_j) (g_j - m) / S    for the j-th of the chosen       (normalize)
    dlogits[e] = scale * s_j (1 - s_j) g_j
and 0 for the others. The correction has no gradient: trainers update it by another rule.

T = tokens   E = experts   k = experts of a token
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.routing import portable

MOST_EXPERTS = 4096
"""The most experts of a row that one program of the Triton kernels can process."""
MOST_GROUPS = 64
"""The most groups that one program of the Triton kernels can process."""


def route_ref(logits: Tensor, k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """(weights, ids) by the formula in float64, for tests."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids = order.sort(-1).values
    chosen = logits.double().gather(-1, ids)
    whole = chosen if normalize else logits.double()
    return (chosen - whole.logsumexp(-1, keepdim=True)).exp(), ids.int()


def route_corrected_ref(
    logits: Tensor, correction: Tensor, k: int, normalize: bool, groups: int, top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights, ids) by the formula in float64, row by row, for tests."""
    weights, ids = [], []
    for row in logits.double():
        s = row.sigmoid()
        c = s + correction.double()
        by_group = c.view(groups, -1)
        best = by_group.topk(2, dim=1).values.sum(dim=1)
        order = sorted(range(groups), key=lambda g: (-float(best[g]), g))[:top_groups]
        inside = [e for e in range(len(c)) if e // by_group.shape[1] in order]
        chosen = sorted(sorted(inside, key=lambda e: (-float(c[e]), e))[:k])
        of_chosen = s[chosen]
        weights.append(scale * of_chosen / (of_chosen.sum() if normalize else 1.0))
        ids.append(torch.tensor(chosen, dtype=torch.int32))
    return torch.stack(weights), torch.stack(ids)


_module = two_backends(portable, lazy_module("rlk_kernels.ops.routing.kernels"))


def _fake_backward(logits, *rest):
    return logits.new_empty(logits.shape)


@custom_op("route_backward", _fake_backward, no_gradient=("route", SECOND))
def _route_backward(
    logits: Tensor, weights: Tensor, ids: Tensor, grad: Tensor, normalize: bool, backend: str
) -> Tensor:
    module = _module("route_backward", backend)
    return module.backward(logits, weights, ids, grad, normalize)


@custom_op("route_corrected_backward", _fake_backward, no_gradient=("route_corrected", SECOND))
def _route_corrected_backward(
    logits: Tensor, ids: Tensor, grad: Tensor, normalize: bool, scale: float, backend: str
) -> Tensor:
    module = _module("route_corrected_backward", backend)
    return module.backward_corrected(logits, ids, grad, normalize, scale)


def _setup(ctx, inputs, output):
    logits, _, ctx.normalize, ctx.backend = inputs
    weights, ids = output
    ctx.mark_non_differentiable(ids)
    ctx.save_for_backward(logits, weights, ids)


def _backward(ctx, grad, _):
    how = ctx.normalize, ctx.backend
    return _route_backward(*ctx.saved_tensors, grad.contiguous(), *how), None, None, None


def _setup_corrected(ctx, inputs, output):
    logits, _, _, ctx.normalize, _, _, ctx.scale, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _backward_corrected(ctx, grad, _):
    how = ctx.normalize, ctx.scale, ctx.backend
    grad = grad.contiguous()
    return (_route_corrected_backward(*ctx.saved_tensors, grad, *how), *(None,) * 7)


@custom_op("route", lambda logits, k, *rest: _fake(logits, k), setup=_setup, backward=_backward)
def _route(logits: Tensor, k: int, normalize: bool, backend: str) -> tuple[Tensor, Tensor]:
    return _module("route", backend).forward(logits, k, normalize)


@custom_op(
    "route_corrected",
    lambda logits, correction, k, *rest: _fake(logits, k),
    setup=_setup_corrected,
    backward=_backward_corrected,
)
def _route_corrected(
    logits: Tensor, correction: Tensor, k: int, normalize: bool, groups: int, top_groups: int,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    module = _module("route_corrected", backend)
    return module.forward_corrected(logits, correction, k, normalize, groups, top_groups, scale)


def _fake(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    t = logits.shape[0]
    return logits.new_empty(t, k), logits.new_empty(t, k, dtype=torch.int32)


def route(
    logits: Tensor, k: int, *, normalize: bool = True, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k]) of logits[T, E], the experts of a token in ascending id.

    logits: float32 (float64 on the torch backend), as `linear(..., out_dtype=torch.float32)`
    returns them; weights have their dtype. normalize: the weights of a token add up to 1. Raises
    UnsupportedShape if k is not in 1..E or E is above 4096, UnsupportedDtype, and what
    `backend.choose` raises.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1] <= MOST_EXPERTS:
        raise UnsupportedShape(
            f"route: logits {tuple(logits.shape)} and k={k}; logits[T, E] with 1 <= k <= E <= "
            f"{MOST_EXPERTS} are needed"
        )
    if logits.dtype not in (torch.float32, torch.float64):
        raise UnsupportedDtype(
            f"route: logits are {logits.dtype}; float32 is needed, because 16-bit logits have ties"
        )
    chosen = choose("route", backend, logits)
    return call(_route, logits.contiguous(), k, normalize, chosen)


def route_corrected(
    logits: Tensor,
    correction: Tensor,
    k: int,
    *,
    normalize: bool = True,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k]) of logits[T, E] and correction[E], with the experts of a
    token in ascending id.

    logits: float32 (float64 on the torch backend), as `linear(..., out_dtype=torch.float32)`
    returns them; correction and weights have their dtype. All weights are multiplied by `scale`;
    normalize: those of a token add up to it. The experts are chosen from `top_groups` of `groups`
    equal groups. Raises UnsupportedShape if E is above 4096 or not a multiple of groups, if there
    are more than 64 groups or several groups of one expert, or if the chosen groups have fewer than
    k experts; UnsupportedDtype, and what `backend.choose` raises.
    """
    experts = logits.shape[-1]
    of_group, rest = divmod(experts, groups) if groups > 0 else (0, 1)
    fits = logits.dim() == 2 and correction.shape == (experts,) and experts <= MOST_EXPERTS
    grouped = not rest and groups <= MOST_GROUPS and (of_group > 1 or groups == top_groups == 1)
    few = 1 <= top_groups <= groups and 1 <= k <= of_group * top_groups
    if not (fits and grouped and few):
        raise UnsupportedShape(
            f"route_corrected: logits {tuple(logits.shape)}, correction {tuple(correction.shape)}, "
            f"k={k}, groups={groups} and top_groups={top_groups}; logits[T, E] and correction[E] "
            f"with E <= {MOST_EXPERTS}, at most {MOST_GROUPS} equal groups of at least 2 experts, "
            "and 1 <= k <= the experts of top_groups are needed"
        )
    if logits.dtype not in (torch.float32, torch.float64) or correction.dtype != logits.dtype:
        raise UnsupportedDtype(
            f"route_corrected: logits are {logits.dtype} and their correction {correction.dtype}; "
            "float32 is needed, because 16-bit logits have ties"
        )
    chosen = choose("route_corrected", backend, logits, correction)
    correction = correction.detach().contiguous()
    how = k, normalize, groups, top_groups, float(scale)
    return call(_route_corrected, logits.contiguous(), correction, *how, chosen)
