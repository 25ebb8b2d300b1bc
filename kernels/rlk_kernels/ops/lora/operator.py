"""add_lora: a projection's output plus the update of a LoRA adapter, which each row chooses.

    h[t, r] = round( sum_k x[t, k] * A[slot_t, r, k] )
    y[t, n] = round( base[t, n] + scale[slot_t] * ( sum_r h[t, r] * B[slot_t, n, r] ) )

Both sums are fp32 (`rows_by_slot`, below). A and B are rounded to x's dtype first; the scale is
fp32 and is folded into neither. The second sum is not rounded; its product with the scale and the
sum with base are fp32, one rounding each (no multiply-add), and y is rounded once more to x's
dtype. A row without an adapter, whose slot is outside of 0 .. S - 1 or has the scale 0, is a copy
of base: -0 stays -0. A row's bits depend on neither the other rows nor the other adapters.

Order of a sum: on Triton segments of 512 numbers (`few_rows.SEGMENT`), each in one fp32 accumulator
from front to back in steps of the tensor core; the sums of segments are added in fp32 from front to
back. Few rows have a program for each segment, many rows one for all. Zeros behind the rank of an
adapter, by which engines pad adapters to one shape, change no bit. Portable: error-free splitting,
whose sums no order can change.

Projections of one x, such as q, k and v, may be computed together: the columns of base are then
those of P projections side by side, each with its own A, B and scale.

Gradients, with dy rounded to x's dtype; a row without an adapter has none but that of base:
    dbase[t, n] = dy[t, n]
    dh[t, r]    = round( scale[slot_t] * sum_n dy[t, n] B[slot_t, n, r] )
    dx[t, k]    = round( sum_r dh[t, r] A[slot_t, r, k] )            a row depends on its row
    dA[s, r, k] = sum_(t of s) dh[t, r] x[t, k]                      as the dweight of `linear`
    dB[s, n, r] = scale[s] * sum_(t of s) dy[t, n] h[t, r]           likewise, in fp32
dA and dB are in the dtype of A and B. They are sums over rows: they repeat, and rows of other
adapters and trailing rows of zeros change nothing. On the torch backend the order of the rows
changes nothing either.

T = rows (all leading dimensions)   S = slots, each for an adapter   R = rank
K, N = in, out features                P = projections of one x
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.ops.linear import weight_grad
from rlk_kernels.ops.lora import portable

_module = two_backends(portable, lazy_module("rlk_kernels.ops.lora.kernels"))


def add_lora_ref(
    x: Tensor, base: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None = None
) -> Tensor:
    """The formula in float64, for tests."""
    y = base.double()
    for s in range(a.shape[0]):
        update = scales[s].double() * (x.double() @ a[s].double().mT @ b[s].double().mT)
        mine = torch.ones_like(y[..., 0], dtype=torch.bool) if slots is None else slots == s
        y = torch.where(mine[..., None], y + update, y)
    return y


def _rows_fake(x, weight, *rest):
    return x.new_empty(x.shape[0], weight.shape[1])


@custom_op("lora_rows", _rows_fake, no_gradient=("add_lora", SECOND))
def _rows(
    x: Tensor, weight: Tensor, scales: Tensor, slots: Tensor | None, scaled: bool, backend: str
) -> Tensor:
    """[T, F]: the rounded products of rows of x[T, K] with weight[S, F, K], multiplied by the scale
    if `scaled`; zeros for rows without an adapter."""
    module = _module("add_lora_backward", backend)
    return module.rows_by_slot(x, weight, scales, slots, scaled, None)


def _of_slot(rows: Tensor, slots: Tensor | None, s: int) -> Tensor:
    """rows[T, F] with zeros in place of the rows of other slots."""
    return rows if slots is None else torch.where((slots == s)[:, None], rows, 0)


def _shrink_setup(ctx, inputs, output):
    x, a, scales, slots, ctx.backend = inputs
    ctx.save_for_backward(x, a, scales, slots)


def _shrink_backward(ctx, dh):
    x, a, scales, slots = ctx.saved_tensors
    dh = dh.contiguous()
    dx = da = None
    if ctx.needs_input_grad[0]:
        dx = _rows(dh, a.to(x.dtype).mT, scales, slots, False, ctx.backend)
    if ctx.needs_input_grad[1]:
        da = torch.stack([
            weight_grad(_of_slot(dh, slots, s), _of_slot(x, slots, s), a.dtype, ctx.backend)
            for s in range(a.shape[0])
        ])  # fmt: skip
    return dx, da, None, None, None


@custom_op("lora_shrink", _rows_fake, setup=_shrink_setup, backward=_shrink_backward)
def _shrink(x: Tensor, a: Tensor, scales: Tensor, slots: Tensor | None, backend: str) -> Tensor:
    """h[T, R] of x[T, K] and a[S, R, K]."""
    module = _module("lora_shrink", backend)
    return module.rows_by_slot(x, a.to(x.dtype), scales, slots, False, None)


def _expand_setup(ctx, inputs, output):
    _base, h, b, scales, slots, ctx.backend = inputs
    ctx.save_for_backward(h, b, scales, slots)


def _expand_backward(ctx, dy):
    h, b, scales, slots = ctx.saved_tensors
    dy = dy.contiguous()
    dh = db = None
    if ctx.needs_input_grad[1]:
        dh = _rows(dy, b.to(h.dtype).mT, scales, slots, True, ctx.backend)
    if ctx.needs_input_grad[2]:
        wide = scales.dtype
        sums = [
            weight_grad(_of_slot(dy, slots, s), _of_slot(h, slots, s), wide, ctx.backend)
            for s in range(b.shape[0])
        ]
        db = (torch.stack(sums) * scales[:, None, None]).to(b.dtype)
    return dy, dh, db, None, None, None


@custom_op(
    "lora_expand",
    lambda base, *rest: base.new_empty(base.shape),
    setup=_expand_setup,
    backward=_expand_backward,
)
def _expand(
    base: Tensor, h: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None, backend: str
) -> Tensor:
    """y[T, N] of base[T, N], h[T, R] and b[S, N, R]."""
    module = _module("lora_expand", backend)
    return module.rows_by_slot(h, b.to(h.dtype), scales, slots, True, base)


@custom_op(
    "add_lora",
    lambda base, *rest: base.new_empty(base.shape),
    no_gradient=("add_lora", "without gradients it computes both halves as one"),
)
def _add(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None,
    widths: list[int], backend: str,
) -> Tensor:  # fmt: skip
    """y[T, N] of base[T, N], x[T, K], a[P, S, R, K], b[S, N, R] and scales[P, S]."""
    module = _module("add_lora", backend)
    return module.add_lora(base, x, a.to(x.dtype), b.to(x.dtype), scales, slots, widths)


def _check_factor(
    rows: Sequence[int], dtype: torch.dtype, name: str, factor: Tensor, scales: Tensor
) -> None:
    """Raise UnsupportedShape or UnsupportedDtype if a factor [S, F, K] does not fit `rows`, the
    shape of x[..., K]."""
    sizes = factor.dim() == 3 and scales.dim() == 1 and len(rows) >= 1
    if not sizes or rows[-1] != factor.shape[2] or not 0 < len(factor) == len(scales):
        raise UnsupportedShape(
            f"add_lora: {name} {tuple(factor.shape)} and scales {tuple(scales.shape)} do not fit "
            f"rows {tuple(rows)}; x[..., K], A[S, R, K], B[S, N, R] and scales[S] are needed"
        )
    wide = wide_dtype(dtype)
    if factor.dtype not in (dtype, wide):
        raise UnsupportedDtype(f"add_lora: {name} is {factor.dtype}; {dtype} or {wide} is needed")
    if scales.dtype != wide:
        raise UnsupportedDtype(f"add_lora: scales are {scales.dtype}; {wide} is needed")


def _flat_slots(x: Tensor, factor: Tensor, slots: Tensor | None) -> Tensor | None:
    """The slot of each row, contiguous. Raises UnsupportedShape or UnsupportedDtype."""
    if slots is None:
        if len(factor) != 1:
            raise UnsupportedShape(f"add_lora: {len(factor)} adapters need slots")
        return None
    if slots.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"add_lora: slots are {slots.dtype}; int32 or int64 is needed")
    if slots.shape != x.shape[:-1]:
        raise UnsupportedShape(
            f"add_lora: slots {tuple(slots.shape)} do not fit x {tuple(x.shape)}"
        )
    return slots.reshape(-1).contiguous()


def lora_shrink(
    x: Tensor, a: Tensor, scales: Tensor, slots: Tensor | None = None, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """h[..., R] of x[..., K] and A[S, R, K]: the first half of `add_lora`, with its arguments and
    errors. A row without an adapter is zeros."""
    chosen = choose("add_lora", backend, x, a, scales, slots)
    _check_factor(x.shape, x.dtype, "A", a, scales)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    h = call(_shrink, rows, a, scales.detach().contiguous(), _flat_slots(x, a, slots), chosen)
    return h.view(*x.shape[:-1], a.shape[1])


def _check_base(rows: Sequence[int], dtype: torch.dtype, base: Tensor, columns: int) -> None:
    """Raise UnsupportedShape or UnsupportedDtype if base is not [*rows, columns] in `dtype`."""
    if base.shape != (*rows, columns):
        raise UnsupportedShape(
            f"add_lora: base {tuple(base.shape)} does not fit x and B of {columns} columns; "
            f"{(*rows, columns)} is needed"
        )
    if base.dtype != dtype:
        raise UnsupportedDtype(f"add_lora: base is {base.dtype} and x is {dtype}; cast one")


def lora_expand(
    h: Tensor, base: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None = None, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """y[..., N] of h[..., R], base[..., N] and B[S, N, R]: the second half of `add_lora`, with its
    arguments and errors."""
    chosen = choose("add_lora", backend, h, base, b, scales, slots)
    _check_factor(h.shape, h.dtype, "B", b, scales)
    _check_base(h.shape[:-1], h.dtype, base, b.shape[1])
    rows = h.shape[:-1].numel()
    how = scales.detach().contiguous(), _flat_slots(h, b, slots), chosen
    y = call(_expand, base.reshape(rows, base.shape[-1]), h.reshape(rows, h.shape[-1]), b, *how)
    return y.view(base.shape)


def _check_widths(a: Tensor, b: Tensor, scales: Tensor, widths: Sequence[int]) -> None:
    """Raise UnsupportedShape if the arguments are not of as many projections as `widths`."""
    counts = a.dim() == 4 and b.dim() == 3 and scales.dim() == 2
    counts = counts and 0 < len(widths) == len(a) == len(scales)
    if not counts or min(widths) < 1 or sum(widths) != b.shape[1]:
        raise UnsupportedShape(
            f"add_lora: A {tuple(a.shape)}, B {tuple(b.shape)} and scales {tuple(scales.shape)} do "
            f"not fit widths {list(widths)}; A[P, S, R, K], B[S, N, R], scales[P, S] and P widths "
            "that add up to N are needed"
        )


def add_lora(
    x: Tensor, base: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None = None, *,
    widths: Sequence[int] | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """y[..., N]: base[..., N] plus scales[s] * (x[..., K] @ A[s]^T) @ B[s]^T, where each row is of
    the adapter s = slots[...], for A[S, R, K] and B[S, N, R]. A row whose slot is outside of
    0 .. S - 1, or whose scale is 0, is that of base. Without slots, all rows are of one adapter.
    With `widths`, base and B have the columns of P projections of x side by side, so many of each;
    A is [P, S, R, K] and scales are [P, S]. Each projection has the bits that it has alone.

    x, base: one dtype of bfloat16, float16, float32 (float64 on the torch backend); A, B: in that
    dtype or float32; scales: float32 (float64 for float64 rows), without a gradient; slots: int32
    or int64. Any strides are supported. Raises UnsupportedShape, UnsupportedDtype, and what
    `backend.choose` raises.
    """
    chosen = choose("add_lora", backend, x, base, a, b, scales, slots)
    if widths is None:
        a, scales, widths = a[None], scales[None], b.shape[1:2]
    else:
        _check_widths(a, b, scales, widths)
    for a_p, scales_p in zip(a, scales, strict=True):
        _check_factor(x.shape, x.dtype, "A", a_p, scales_p)
        _check_factor((*x.shape[:-1], a_p.shape[1]), x.dtype, "B", b, scales_p)
    _check_base(x.shape[:-1], x.dtype, base, b.shape[1])
    widths, slots_of = list(widths), {"slots": slots, "backend": chosen}
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, base, a, b)):
        parts = zip(a, b.split(widths, 1), scales, base.split(widths, -1), strict=True)
        added = [
            lora_expand(
                lora_shrink(x, a_p, scales_p, **slots_of), base_p, b_p, scales_p, **slots_of
            )
            for a_p, b_p, scales_p, base_p in parts
        ]
        return added[0] if len(added) == 1 else torch.cat(added, -1)
    rows = x.shape[:-1].numel()
    flat = base.reshape(rows, base.shape[-1]), x.reshape(rows, x.shape[-1]), a, b
    how = scales.detach().contiguous(), _flat_slots(x, b, slots), widths, chosen
    return call(_add, *flat, *how).view(base.shape)
