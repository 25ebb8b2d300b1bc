"""gated_delta_rule and cached_gated_delta_rule: a gated delta net's state and what is read of it.

    S[t] = exp(g[t]) S[t-1] + k[t] u[t]^T      u[t] = beta[t] (v[t] - exp(g[t]) k[t] S[t-1])
    out[t] = q[t] S[t]                         q and k by head, divided by their L2 norms; q times
                                               scale

Order ("row"): chunks of CHUNK rows, counted from the sequence's first token. S is the fp32 state at
the chunk's beginning, G the fp32 sum of g from the chunk's first row to a row; "rounded" means to
q's dtype. In a chunk, the state does not move:

    q, k = rounded( x / sqrt( sum_d x[d]^2 + eps ) ), q times scale before it is rounded
    u_i = rounded( beta_i (v_i - exp(G_i) k_i S') - sum_{j<i} beta_i exp(G_i - G_j) k_i k_j u_j )
    P_ij = rounded( exp(G_i - G_j) q_i k_j )
    out_i = rounded( exp(G_i) q_i S' + sum_{j<=i} P_ij u_j )
    S = exp(G_last) S + sum_j k_j rounded( exp(G_last - G_j) u_j )     after row CHUNK - 1

with S' = rounded(S). Sums over j go from front to back. On the triton backend, products are those
of tensor cores: u_j of earlier blocks of 16 rows are added up there, and the sum is subtracted;
then those of the row's own block are, one by one (`kernels.py`, `decode_kernels.py`). So a row
needs the state at the chunk's beginning, and k, u and G of the rows before it in the chunk, which a
cache keeps. A row has the same bits in decode, in any prefill, in a prefill cut anywhere, with
other sequences, and for any share of the heads of v, or of their features.

The gradient (`gradient.py`, and `backward_kernels.py` on the triton backend) computes the states at
the beginnings of chunks again. On the triton backend its sums are not in the forward's order.

T = rows of all sequences   B = sequences   Hk = heads of q and k   Hv = heads of v, a multiple
D = features of q and k   E = features of v
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.arguments import int32_vector
from rlk_kernels.ops.delta_rule import on_torch
from rlk_kernels.ops.delta_rule.chunk import CHUNK

MAX_DIM = 128


def gated_delta_rule_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor,
    scale: float | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """The formula token by token in float64, without the roundings, for tests."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    group, scale = v.shape[1] // q.shape[1], q.shape[2] ** -0.5 if scale is None else scale
    q, k = (x * (x.square().sum(-1, keepdim=True) + eps).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, 1) for x in (q * scale, k))
    rows = []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        state = v.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        for t in range(begin, end):
            state = state * g[t].exp()[:, None, None]
            u = (v[t] - torch.einsum("hd,hde->he", k[t], state)) * beta[t][:, None]
            state = state + k[t][:, :, None] * u[:, None]
            rows.append(torch.einsum("hd,hde->he", q[t], state))
    return torch.stack(rows)


_module = two_backends(on_torch, lazy_module("rlk_kernels.ops.delta_rule.on_triton"))


@custom_op(
    "gated_delta_rule_backward",
    lambda q, k, v, g, beta, *rest: tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta)),
    no_gradient=("gated_delta_rule", SECOND),
)
def _gated_delta_rule_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, do: Tensor, scale: float,
    eps: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    module = _module("gated_delta_rule_backward", backend)
    return module.backward(q, k, v, g, beta, cu, scale, eps, do)


@custom_op(
    "gated_delta_rule", lambda q, k, v, *rest: v.new_empty(v.shape),
    gradients=(6, _gated_delta_rule_backward),
)  # fmt: skip
def _gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    backend: str,
) -> Tensor:  # fmt: skip
    return _module("gated_delta_rule", backend).forward(q, k, v, g, beta, cu, scale, eps)


@custom_op(
    "cached_gated_delta_rule",
    lambda state, keys, updates, decays, q, k, v, *rest: v.new_empty(v.shape),
    writes=("state", "keys", "updates", "decays"),
)
def _cached_gated_delta_rule(
    state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor, q: Tensor, k: Tensor, v: Tensor,
    g: Tensor, beta: Tensor, slots: Tensor, context: Tensor, cu: Tensor, scale: float, eps: float,
    backend: str,
) -> Tensor:  # fmt: skip
    return _module("cached_gated_delta_rule", backend).cached(
        (state, keys, updates, decays), q, k, v, g, beta, slots, context, cu, scale, eps
    )


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, eps: float
) -> None:
    if q.dim() != 3 or v.dim() != 3 or q.shape != k.shape or len(q) != len(v):
        raise UnsupportedShape(
            f"{op}: q and k[T, Hk, D] and v[T, Hv, E] are needed, not {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    heads, value_heads = q.shape[1], v.shape[1]
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise UnsupportedShape(
            f"{op}: {value_heads} heads of v are not a multiple of {heads} heads of q and k"
        )
    if not (0 < q.shape[2] <= MAX_DIM and 0 < v.shape[2] <= MAX_DIM):
        raise UnsupportedShape(
            f"{op}: head sizes {q.shape[2]} and {v.shape[2]} are not in 1..{MAX_DIM}"
        )
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise UnsupportedShape(
            f"{op}: g and beta must be {tuple(v.shape[:2])}, not {tuple(g.shape)} and "
            f"{tuple(beta.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype == beta.dtype or not q.is_floating_point():
        raise UnsupportedDtype(
            f"{op}: q, k, v and beta are {q.dtype}, {k.dtype}, {v.dtype} and {beta.dtype}; one "
            "floating dtype is needed"
        )
    wide = wide_dtype(q.dtype)
    if g.dtype != wide:
        raise UnsupportedDtype(f"{op}: g is {g.dtype}; {wide} is needed")
    if not scale > 0:
        raise ValueError(f"{op}: scale must be above 0, not {scale}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative, not {eps}")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """out[T, Hv, E] of q and k[T, Hk, D], v[T, Hv, E], g and beta[T, Hv] of whole sequences.

    q, k, v, beta: bfloat16, float16, float32 (float64 on the torch backend); g: float32, at most 0
    where a state decays. Value head h reads head h // (Hv / Hk) of q and k; D, E <= 128.
    cu_seqlens[B + 1]: the begins of the sequences. scale defaults to 1 / sqrt(D), eps is added to a
    head's sum of squares. Differentiable in q, k, v, g and beta. cu_seqlens beyond T raise on the
    torch backend and are not checked on a GPU. Rows outside every sequence are undefined on a GPU
    and 0 on the torch backend. Raises UnsupportedShape, UnsupportedDtype, ValueError, and what
    `backend.choose` raises.
    """
    op = "gated_delta_rule"
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    _check(op, q, k, v, g, beta, scale, eps)
    cu = int32_vector(op, "cu_seqlens", cu_seqlens)
    chosen = choose(op, backend, q, k, v, g, beta, cu)
    dense = (x.contiguous() for x in (q, k, v, g, beta))
    return call(_gated_delta_rule, *dense, cu, scale, float(eps), chosen)


def cached_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """`gated_delta_rule` of rows that continue sequences, with the bits of the whole sequences.

    q, k, v, g, beta: the new rows of B sequences, as in `gated_delta_rule`; cu_seqlens[B + 1]
    integers. What a sequence keeps lies at slots[B] of four tensors, which are written: state[N,
    Hv, D, E] (float32), the state at the open chunk's beginning, and that chunk's rows: keys[N,
    CHUNK, Hk, D] and updates[N, CHUNK, Hv, E] in q's dtype, decays[N, CHUNK, Hv] (float32). Slots
    may have any stride; the rest of each tensor is dense. A copy of a slot is a copy of the
    sequence, at any length. context_lens[B]: the tokens of each sequence before its new rows; with
    0 a sequence begins, whatever is in its slot. No two sequences may share a slot. A slot outside
    of the cache raises IndexError on the torch backend; on a GPU its rows are undefined and nothing
    is written. There is no gradient. Raises UnsupportedShape, UnsupportedDtype, ValueError, and
    what `backend.choose` raises.
    """
    op = "cached_gated_delta_rule"
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    _check(op, q, k, v, g, beta, scale, eps)
    (_, heads, dim), (_, value_heads, value_dim) = q.shape, v.shape
    wide = g.dtype
    n = state.shape[0] if state.dim() else 0
    expected = {
        "state": (state, (n, value_heads, dim, value_dim), wide),
        "keys": (keys, (n, CHUNK, heads, dim), q.dtype),
        "updates": (updates, (n, CHUNK, value_heads, value_dim), q.dtype),
        "decays": (decays, (n, CHUNK, value_heads), wide),
    }
    for name, (x, shape, dtype) in expected.items():
        if x.shape != shape:
            raise UnsupportedShape(f"{op}: {name} must be {shape}, not {tuple(x.shape)}")
        if x.dtype != dtype:
            raise UnsupportedDtype(f"{op}: {name} is {x.dtype}; {dtype} is needed")
        if n and not x[0].is_contiguous():
            raise UnsupportedShape(
                f"{op}: each slot of {name} must be dense; its strides are {x.stride()}"
            )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta)):
        raise ValueError(f"{op}: it has no gradient; use gated_delta_rule, or torch.no_grad()")
    cu = int32_vector(op, "cu_seqlens", cu_seqlens)
    slots = int32_vector(op, "slots", slots, cu.numel() - 1)
    context = int32_vector(op, "context_lens", context_lens, cu.numel() - 1)
    chosen = choose(op, backend, q, k, v, g, beta, state, keys, updates, decays, slots, context, cu)
    dense = (x.contiguous() for x in (q, k, v, g, beta))
    return call(
        _cached_gated_delta_rule, state, keys, updates, decays, *dense, slots, context, cu, scale,
        float(eps), chosen,
    )  # fmt: skip
