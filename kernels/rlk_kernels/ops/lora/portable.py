"""The products of `add_lora` in PyTorch, by error-free splitting."""

import torch
from torch import Tensor

from rlk_kernels.matmul.portable import product


def rows_by_slot(
    x: Tensor, weight: Tensor, scales: Tensor, slots: Tensor | None, scaled: bool,
    base: Tensor | None,
) -> Tensor:  # fmt: skip
    """[T, F] of x[T, K], weight[S, F, K], scales[S] and slots[T]: the product of each row with the
    weight of its slot, multiplied by the slot's scale if `scaled`, plus base[T, F]; base, or zeros,
    for a row whose slot is outside of 0 .. S - 1 or has the scale 0."""
    if base is None:
        out = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    else:
        out = base.clone(memory_format=torch.contiguous_format)
    for s in range(weight.shape[0]):
        if slots is None and s > 0:
            break
        if not bool(scales[s]):
            continue
        mine = slice(None) if slots is None else (slots == s).nonzero()[:, 0]
        value = product(x[mine], weight[s], None, False, True, scales.dtype)
        if scaled:
            value = value * scales[s]
        if base is not None:
            value = base[mine].to(scales.dtype) + value
        out[mine] = value.to(x.dtype)
    return out


def add_lora(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None,
    widths: list[int],
) -> Tensor:  # fmt: skip
    """[T, N] of base[T, N], x[T, K], a[P, S, R, K], b[S, N, R] and scales[P, S]: the update of P
    projections, which lie side by side in the columns of base, each as wide as `widths` says."""
    added = [
        rows_by_slot(rows_by_slot(x, a_p, scales_p, slots, False, None), b_p, scales_p, slots, True,
                     base_p)
        for a_p, b_p, scales_p, base_p in zip(
            a, b.split(widths, 1), scales, base.split(widths, 1), strict=True
        )
    ]  # fmt: skip
    return added[0] if len(added) == 1 else torch.cat(added, 1)
