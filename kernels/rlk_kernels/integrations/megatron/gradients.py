"""The norm of a GPTModel's gradients, summed in one order for any number of tensor-parallel ranks.

    sqrt( sum over parameters of the sum over rows of the sum of a row's squares )     float64

Rows are those of the whole parameter. Ranks that have columns of a parameter exchange them for
rows, and the rows' sums are gathered in the order of one rank."""

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import Tensor

from rlk_kernels.parallel.copies import columns_to_rows, gather_columns
from rlk_kernels.parallel.gradient_rows import norm_of, row_squares


def gradient_norm(model: torch.nn.Module) -> Tensor:
    """See the package."""
    return norm_of(_row_sums(model))


def _row_sums(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yields float64 [rows] for each whole parameter with a gradient, in the model's order."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is not None:
                yield _of_all_ranks(module, name, grad)


def _of_all_ranks(module: torch.nn.Module, name: str, grad: Tensor) -> Tensor:
    if isinstance(module, RowParallelLinear) and name == "weight":
        return gather_columns(row_squares(columns_to_rows(grad, module.tp_group)), module.tp_group)
    if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
        # Fused operators lie side by side, each with the rows of all ranks.
        return gather_columns(row_squares(grad), module.tp_group, getattr(module, "rlk_blocks", 1))
    return row_squares(grad)
