"""embedding: y[t] = weight[ids[t]], a copy: no arithmetic, every bit kept.

Gradient: dweight[v] = round( sum of dy[t] over the tokens t with ids[t] = v ), fp32. The tokens of
one id are taken in the order in which they stand; no atomics. triton: front to back. torch: in
pairs of neighbours, pairs of pairs, and so on.

T = tokens (all dimensions of ids)   V = vocabulary   H = features
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape

BLOCK = 1024


def embedding_ref(ids: Tensor, weight: Tensor) -> Tensor:
    """Advanced indexing, for tests."""
    return weight[ids]


@triton.jit
def _embedding_fwd_kernel(ids_ptr, w_ptr, y_ptr, stride_w, H, V, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    row += tl.zeros((BLOCK,), tl.int64)
    known = (cols < H) & (row >= 0) & (row < V)
    y = tl.load(w_ptr + row * stride_w + cols, mask=known, other=float("nan"))
    tl.store(y_ptr + token * H + cols, y, mask=cols < H)


@triton.jit(do_not_specialize=["T"])
def _embedding_bwd_kernel(sorted_ptr, order_ptr, dy_ptr, dw_ptr, T, H, V, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(sorted_ptr + at).to(tl.int64)
    before = tl.load(sorted_ptr + at - 1, mask=at > 0, other=-1).to(tl.int64)
    if (row == before) | (row < 0) | (row >= V):
        return  # the first token's program adds them all; ids outside of V have no gradient
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    total = tl.zeros((BLOCK,), tl.float32)
    here = row
    while here == row:
        token = tl.load(order_ptr + at)
        total += tl.load(dy_ptr + token * H + cols, mask=mask, other=0.0).to(tl.float32)
        at += 1
        here = tl.load(sorted_ptr + at, mask=at < T, other=-1).to(tl.int64)
    tl.store(dw_ptr + row * H + cols, total.to(dw_ptr.dtype.element_ty), mask=mask)


def _grad_portable(ids: Tensor, dy: Tensor, rows: int) -> Tensor:
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    key, order = torch.sort(ids, stable=True)
    value = dy[order].to(wide)
    while key.numel():
        # rank of each row among those of its id; neighbours (2i, 2i + 1) are added
        start = torch.searchsorted(key, key)
        rank = torch.arange(key.numel(), device=key.device) - start
        odd = rank % 2 == 1
        if not bool(odd.any()):
            break
        position = odd.nonzero().squeeze(1)
        value[position - 1] += value[position]
        key, value = key[~odd], value[~odd]
    grad = dy.new_zeros(rows, dy.shape[1])
    grad[key] = value.to(dy.dtype)
    return grad


@torch.library.custom_op("rlk::embedding", mutates_args=())
def _embedding(ids: Tensor, weight: Tensor, backend: str) -> Tensor:
    record("embedding", backend)
    if backend == "torch":
        return weight.index_select(0, ids)
    t, h = ids.numel(), weight.shape[1]
    y = torch.empty(t, h, dtype=weight.dtype, device=weight.device)
    if t and h:
        _embedding_fwd_kernel[(t, triton.cdiv(h, BLOCK))](
            ids, weight, y, weight.stride(0), h, weight.shape[0], BLOCK, num_warps=4
        )
    return y


@_embedding.register_fake
def _(ids, weight, backend):
    return weight.new_empty(ids.shape[0], weight.shape[1])


@torch.library.custom_op("rlk::embedding_backward", mutates_args=())
def _embedding_backward(ids: Tensor, dy: Tensor, rows: int, backend: str) -> Tensor:
    record("embedding_backward", backend)
    if backend == "torch":
        return _grad_portable(ids, dy, rows)
    grad = torch.zeros(rows, dy.shape[1], dtype=dy.dtype, device=dy.device)
    if ids.numel() and dy.shape[1]:
        key, order = torch.sort(ids, stable=True)
        _embedding_bwd_kernel[(ids.numel(), triton.cdiv(dy.shape[1], BLOCK))](
            key, order, dy, grad, ids.numel(), dy.shape[1], rows, BLOCK, num_warps=4
        )
    return grad


@_embedding_backward.register_fake
def _(ids, dy, rows, backend):
    return dy.new_empty(rows, dy.shape[1])


def _setup(ctx, inputs, output):
    ids, weight, ctx.backend = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx, dy):
    (ids,) = ctx.saved_tensors
    return None, _embedding_backward(ids, dy.contiguous(), ctx.rows, ctx.backend), None


_embedding.register_autograd(_backward, setup_context=_setup)


def embedding(ids: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """y[..., H] = weight[V, H][ids[...]]; ids int32 or int64 in [0, V), weight of any float dtype
    of the backend. An id outside the vocabulary raises IndexError on the torch backend; on the
    GPU its row is NaN.
    Raises UnsupportedShape, UnsupportedDtype.
    """
    if weight.dim() != 2:
        raise UnsupportedShape(f"embedding: weight[V, H] is needed, not {tuple(weight.shape)}")
    if ids.dtype not in (torch.int32, torch.int64) or not weight.is_floating_point():
        raise UnsupportedDtype(f"embedding: ids are {ids.dtype} and weight is {weight.dtype}")
    chosen = choose("embedding", backend, weight, ids)
    table = weight if weight.stride(-1) == 1 else weight.contiguous()
    y = _embedding(ids.reshape(-1).contiguous(), table, chosen)
    return y.reshape(*ids.shape, weight.shape[1])
