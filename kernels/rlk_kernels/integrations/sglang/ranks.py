"""Tensor-parallel ranks: each computes some outputs of a product from the whole input, where SGLang
divides the input and adds up partial sums. No sum is divided, so the bits are those of one rank.

Where SGLang adds up what the ranks' modules return, outside of them, o_proj, down_proj and sparse
blocks return this rank's outputs among -0, which changes no value that it is added to. Where a
module of SGLang adds up the partial sums itself, it returns the outputs of all ranks instead.

T = rows   F = columns of a rank   R = ranks
"""

from contextlib import ExitStack
from typing import Any

from sglang.srt.distributed import get_tp_group
from sglang.srt.utils import set_weight_attrs
from torch import Tensor
from torch.nn import Parameter


def columns(x: Tensor) -> Tensor:
    """[T, R F] of this rank's x[T, F]."""
    return get_tp_group().all_gather(x.contiguous(), dim=-1)


def summand(x: Tensor) -> Tensor:
    """[T, R F]: x[T, F] in this rank's columns, and -0 in the others."""
    group = get_tp_group()
    out = x.new_full((*x.shape[:-1], group.world_size, x.shape[-1]), -0.0)
    out[..., group.rank_in_group, :] = x
    return out.flatten(-2)


def returned(x: Tensor, reduces: bool) -> Tensor:
    """[T, R F]: what a module with this rank's outputs x[T, F] returns. `reduces`: whether SGLang's
    own module adds up the partial sums itself."""
    return columns(x) if reduces else summand(x)


def share_outputs(undo: ExitStack, module: Any, name: str) -> None:
    """Replaces this rank's columns [..., out, in / R] of a parameter, or a whole bias [out], by its
    rows [..., out / R, in], in the same memory; later updates of the weights load rows too. `undo`
    restores the columns. All ranks call this and `undo`."""
    group, stock = get_tp_group(), getattr(module, name)
    ranks, rank = group.world_size, group.rank_in_group
    outputs = max(stock.dim() - 2, 0)

    def load(
        param: Tensor, loaded: Tensor, *_: Any, expert_id: int | None = None, **__: Any
    ) -> None:
        target = param.data if expert_id is None else param.data[expert_id]
        target.copy_(loaded.chunk(ranks, loaded.dim() - stock.dim() + outputs)[rank])

    def restore() -> None:
        whole = group.all_gather(getattr(module, name).data, dim=outputs)
        stock.data.copy_(whole if stock.dim() == 1 else whole.chunk(ranks, -1)[rank])
        setattr(module, name, stock)

    whole = stock.data if stock.dim() == 1 else group.all_gather(stock.data, dim=-1)
    rows = whole.chunk(ranks, outputs)[rank]
    shared = Parameter(stock.data.flatten()[: rows.numel()].view(rows.shape), requires_grad=False)
    shared.data.copy_(rows)
    set_weight_attrs(shared, vars(stock) | {"weight_loader": load})
    setattr(module, name, shared)
    undo.callback(restore)
