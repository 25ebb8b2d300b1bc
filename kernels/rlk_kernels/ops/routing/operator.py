"""route: the k experts of each token, and their weights.

    chosen[t]     = the k largest of logits[t], ties to the lowest id; kept in ascending id
    weights[t, j] = exp(l_j - m) / sum_i exp(l_i - m)       normalize; m: the largest of these
    weights[t, j] = exp(l_j) / sum_e exp(l_e)               otherwise: over all experts

Order: the sum over the chosen is taken in fp32, one by one in ascending id; the one over all
experts by the tree of `numerics/lse_tree`. A row depends only on its own logits. -0 and +0 are
equal; a NaN counts as larger than any number, and all weights of its row are NaN.

Gradients, with g the gradient of the weights and s = sum_j weights[j] g[j]:
    dlogits[e] = weights[j] (g[j] - s)   for the j-th of the chosen, 0 for the others   (normalize)
    dlogits[e] = p[e] (g[j] - s)         g = 0 for those that were not chosen, p = softmax(logits)

T = tokens   E = experts   k = experts of a token
"""

import torch
from torch import Tensor

from rlk_kernels.backend import call, choose, record, refuse_gradient
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.routing import portable

MOST_EXPERTS = 4096
"""What a program of the Triton kernels holds of one row."""


def route_ref(logits: Tensor, k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """(weights, ids) by the formula in float64, for tests."""
    order = sorted_by_logit(logits)[:, :k]
    ids = order.sort(-1).values
    chosen = logits.double().gather(-1, ids)
    whole = chosen if normalize else logits.double()
    return (chosen - whole.logsumexp(-1, keepdim=True)).exp(), ids.int()


def sorted_by_logit(logits: Tensor) -> Tensor:
    """int64 [T, E]: the experts of each row, the largest logit first, ties by id."""
    return logits.sort(dim=-1, descending=True, stable=True).indices


_on_triton = lazy_module("rlk_kernels.ops.routing.kernels")


@torch.library.custom_op("rlk::route", mutates_args=())
def _route(logits: Tensor, k: int, normalize: bool, backend: str) -> tuple[Tensor, Tensor]:
    record("route", backend)
    if backend == "torch":
        return portable.forward(logits, k, normalize)
    return _on_triton().forward(logits, k, normalize)


@_route.register_fake
def _(logits, k, normalize, backend):
    t = logits.shape[0]
    return logits.new_empty(t, k), logits.new_empty(t, k, dtype=torch.int32)


@torch.library.custom_op("rlk::route_backward", mutates_args=())
def _route_backward(
    logits: Tensor, weights: Tensor, ids: Tensor, grad: Tensor, normalize: bool, backend: str
) -> Tensor:
    record("route_backward", backend)
    if backend == "torch":
        return portable.backward(logits, weights, ids, grad, normalize)
    return _on_triton().backward(logits, weights, ids, grad, normalize)


@_route_backward.register_fake
def _(logits, weights, ids, grad, normalize, backend):
    return logits.new_empty(logits.shape)


refuse_gradient(_route_backward, "route")


def _setup(ctx, inputs, output):
    logits, _, ctx.normalize, ctx.backend = inputs
    weights, ids = output
    ctx.mark_non_differentiable(ids)
    ctx.save_for_backward(logits, weights, ids)


def _backward(ctx, grad, _):
    logits, weights, ids = ctx.saved_tensors
    grad = grad.contiguous()
    return _route_backward(logits, weights, ids, grad, ctx.normalize, ctx.backend), None, None, None


_route.register_autograd(_backward, setup_context=_setup)


def route(
    logits: Tensor, k: int, *, normalize: bool = True, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k]) of logits[T, E], the experts of a token by ascending id.

    logits: float32 (float64 on the torch backend), as `linear(..., out_dtype=torch.float32)` gives
    them; weights have their dtype. normalize: the weights of a token add up to 1.
    Raises UnsupportedShape where k is not in 1..E or E above 4096, UnsupportedDtype, and what
    `backend.choose` raises.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1] <= MOST_EXPERTS:
        raise UnsupportedShape(
            f"route: logits {tuple(logits.shape)} and k={k}; logits[T, E] with 1 <= k <= E <= "
            f"{MOST_EXPERTS} are needed"
        )
    if logits.dtype not in (torch.float32, torch.float64):
        raise UnsupportedDtype(
            f"route: logits are {logits.dtype}; float32 is needed, because 16-bit logits tie"
        )
    chosen = choose("route", backend, logits)
    return call(_route, logits.contiguous(), k, normalize, chosen)
