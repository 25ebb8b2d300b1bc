"""route_corrected: the k experts of each token, by corrected scores, and their weights.

    s[t, e]       = 1 / (1 + exp(-logits[t, e]))
    c[t, e]       = s[t, e] + correction[e]
    groups        : E / groups experts each, one group after another; the score of one is the sum
                    of its two largest c, and the top_groups best are taken, ties to the lowest
    chosen[t]     = the k largest c[t] in these groups, ties to the lowest id; kept in ascending id
    weights[t, j] = scale * (s_j / (sum_i s_i + 1e-20))                                  normalize
    weights[t, j] = scale * s_j                                                          otherwise

This is the choice of DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) and GLM-4.5. Order: sums are
taken in fp32, over the chosen one by one in ascending id, then the 1e-20. A row is a function of
its own logits. -0 and +0 are equal; a NaN is larger than any number.

Gradients, with g the gradient of the weights, S the sum over the chosen and m = sum_j g_j s_j / S:
    dlogits[e] = scale * s_j (1 - s_j) (g_j - m) / S    for the j-th of the chosen       (normalize)
    dlogits[e] = scale * s_j (1 - s_j) g_j
0 for the others. The correction has none: trainers change it by a rule of its own.

T = tokens   E = experts   k = experts of a token
"""

import torch
from torch import Tensor

from rlk_kernels.backend import call, choose, record, refuse_gradient
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.corrected_routing import portable
from rlk_kernels.ops.routing.operator import MOST_EXPERTS

MOST_GROUPS = 64
"""What a program of the Triton kernels goes through, one after another."""


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


_on_triton = lazy_module("rlk_kernels.ops.corrected_routing.kernels")


@torch.library.custom_op("rlk::route_corrected", mutates_args=())
def _route_corrected(
    logits: Tensor, correction: Tensor, k: int, normalize: bool, groups: int, top_groups: int,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    record("route_corrected", backend)
    how = k, normalize, groups, top_groups, scale
    if backend == "torch":
        return portable.forward(logits, correction, *how)
    return _on_triton().forward(logits, correction, *how)


@_route_corrected.register_fake
def _(logits, correction, k, *rest):
    t = logits.shape[0]
    return logits.new_empty(t, k), logits.new_empty(t, k, dtype=torch.int32)


@torch.library.custom_op("rlk::route_corrected_backward", mutates_args=())
def _route_corrected_backward(
    logits: Tensor, ids: Tensor, grad: Tensor, normalize: bool, scale: float, backend: str
) -> Tensor:
    record("route_corrected_backward", backend)
    if backend == "torch":
        return portable.backward(logits, ids, grad, normalize, scale)
    return _on_triton().backward(logits, ids, grad, normalize, scale)


@_route_corrected_backward.register_fake
def _(logits, ids, grad, normalize, scale, backend):
    return logits.new_empty(logits.shape)


refuse_gradient(_route_corrected_backward, "route_corrected")


def _setup(ctx, inputs, output):
    logits, _, _, ctx.normalize, _, _, ctx.scale, ctx.backend = inputs
    _, ids = output
    ctx.mark_non_differentiable(ids)
    ctx.save_for_backward(logits, ids)


def _backward(ctx, grad, _):
    logits, ids = ctx.saved_tensors
    how = ctx.normalize, ctx.scale, ctx.backend
    return (_route_corrected_backward(logits, ids, grad.contiguous(), *how), *(None,) * 7)


_route_corrected.register_autograd(_backward, setup_context=_setup)


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
    """(weights[T, k], ids int32 [T, k]) of logits[T, E] and correction[E], the experts of a token
    by ascending id.

    logits: float32 (float64 on the torch backend), as `linear(..., out_dtype=torch.float32)` gives
    them; correction and weights have their dtype. normalize: the weights of a token add up to
    `scale`, by which they are multiplied. `top_groups` of `groups` equal groups are chosen from.
    Raises UnsupportedShape where E is above 4096, no multiple of groups, or groups above 64 or of
    one expert, and where k are not in the chosen groups; UnsupportedDtype, and what
    `backend.choose` raises.
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
            f"with E <= {MOST_EXPERTS} in equal groups, {MOST_GROUPS} at most, of 2 experts at "
            "least, and 1 <= k <= the experts of top_groups are needed"
        )
    if logits.dtype not in (torch.float32, torch.float64) or correction.dtype != logits.dtype:
        raise UnsupportedDtype(
            f"route_corrected: logits are {logits.dtype} and their correction {correction.dtype}; "
            "float32 is needed: a router rounded to 16 bits ties"
        )
    chosen = choose("route_corrected", backend, logits)
    correction = correction.detach().contiguous()
    how = k, normalize, groups, top_groups, float(scale)
    return call(_route_corrected, logits.contiguous(), correction, *how, chosen)
