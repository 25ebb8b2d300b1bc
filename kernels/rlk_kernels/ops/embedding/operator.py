"""embedding: y[t] = weight[ids[t]], a copy without arithmetic.

Gradient: dweight[v] = round( sum of dy[t] over the tokens t with ids[t] = v ), in fp32. The tokens
of an id are added in their order in the batch, without atomics: front to back on triton; in pairs
of neighbours, pairs of pairs, and so on, on torch.

T = tokens (all dimensions of ids)   V = vocabulary   H = features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.ops.arguments import last_dense
from rlk_kernels.ops.embedding import portable

_module = two_backends(portable, lazy_module("rlk_kernels.ops.embedding.kernels"))


@custom_op(
    "embedding_backward",
    lambda ids, dy, rows, backend: dy.new_empty(rows, dy.shape[1]),
    no_gradient=("embedding", SECOND),
)
def _embedding_backward(ids: Tensor, dy: Tensor, rows: int, backend: str) -> Tensor:
    return _module("embedding_backward", backend).backward(ids, dy, rows)


def embedding_grad(ids: Tensor, dy: Tensor, rows: int, backend: str) -> Tensor:
    """dweight[rows, H] of ids[T] and dy[T, H]."""
    return call(_embedding_backward, ids, dy.contiguous(), rows, backend)


def _setup(ctx, inputs, output):
    ids, weight, ctx.backend = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx, dy):
    return None, embedding_grad(*ctx.saved_tensors, dy, ctx.rows, ctx.backend), None


@custom_op(
    "embedding",
    lambda ids, weight, backend: weight.new_empty(ids.shape[0], weight.shape[1]),
    setup=_setup,
    backward=_backward,
)
def _embedding(ids: Tensor, weight: Tensor, backend: str) -> Tensor:
    return _module("embedding", backend).forward(ids, weight)


def embedding(ids: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """`y[..., H] = weight[V, H][ids[...]]` for int32 or int64 ids in [0, V) and a weight of any
    float dtype of the backend. An id outside the vocabulary raises IndexError on the torch backend,
    and gives a row of NaN on a GPU. Raises UnsupportedShape, UnsupportedDtype.
    """
    if weight.dim() != 2:
        raise UnsupportedShape(f"embedding: weight[V, H] is needed, not {tuple(weight.shape)}")
    if ids.dtype not in (torch.int32, torch.int64) or not weight.is_floating_point():
        raise UnsupportedDtype(
            f"embedding: ids are {ids.dtype} and weight is {weight.dtype}; int32 or int64 ids and "
            "a floating weight are needed"
        )
    chosen = choose("embedding", backend, weight, ids)
    table = last_dense(weight)
    y = call(_embedding, ids.reshape(-1).contiguous(), table, chosen)
    return y.reshape(*ids.shape, weight.shape[1])
