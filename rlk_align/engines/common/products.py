"""The weights that live products compute with, read through the products themselves.

An engine may multiply by a copy that it derived from a parameter: packed, cast, or cached. If the
copy is not made again after an update of the weights, it no longer fits its parameter. The product
with the identity restores the copy bit for bit, except for the sign of zero.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlk_align.engines.common.parameters import LiveParameter, count_not_finite
from rlk_align.engines.common.weights import Parameter, canonical
from rlk_align.model.operators import OPERATORS

Method = tuple[Any, str]
"""The object whose method `(module, rows [N, in], bias)` computes a live product, and
the method's name."""
Methods = Callable[[str], Method]
"""Path of a product's parameter -> its method."""
Gather = Callable[[torch.Tensor], list[torch.Tensor] | None]
_PRODUCTS = frozenset(
    o.parameter or o.name
    for o in OPERATORS.values()
    if o.formula in ("linear", "router") and o.weight
)
"""The canonical names of the parameters of products, without their layers."""
COLUMNS = 64
"""The number of a weight's columns that are read at a time."""


def weights_in_use(
    plan: Iterable[Parameter], model: Any, methods: Methods, gather: Gather
) -> Iterator[LiveParameter]:
    """The canonical parameters with the values that the live forward computes with; called on every
    rank. Where these are a derived copy on some rank, `derived` names its module."""
    for entry in plan:
        path, _, name = entry.name.rpartition(".")
        held = getattr(model.get_submodule(path), name, None)
        if held is None:
            continue
        used = held = held.detach()
        copied = torch.zeros(1, dtype=torch.int32, device=held.device)
        if _PRODUCTS.issuperset(op.rpartition(".")[2] for op in entry.layout.ops):
            module, method = model.get_submodule(path), methods(entry.name)
            if not _computes_with(method, module, held):
                copied += 1 if held.numel() else 2
                used = read_weight(method, module)
        states = torch.cat(gather(copied) or [copied])
        parameters = list(_canonical(entry, used, gather))
        if bool(states.any()):
            # A rank whose parameter is empty has none to compare.
            kept = () if bool((states == 2).any()) else _canonical(entry, held, gather)
            stored = {p.name: p.value for p in kept}
            parameters = [replace(p, derived=path, held=stored.get(p.name)) for p in parameters]
        yield from parameters


def _canonical(entry: Parameter, local: torch.Tensor, gather: Gather) -> Iterator[LiveParameter]:
    return canonical([entry], lambda _: local, gather)


@torch.no_grad()
def read_weight(method: Method, module: Any) -> torch.Tensor:
    """The weight `[out, in]` of a module's product, in the dtype of its parameter if that has every
    bit."""
    held = module.weight
    width = held.shape[1] if held.numel() else _width(module)
    with _exact():
        columns = [_product(method, module, block).cpu() for block in _one_hot(width, held)]
    read = torch.cat(columns).T
    same = read.to(held.dtype)
    return (same if bool((same == read).all()) else read).to(held.device)


def _width(module: Any) -> int:
    """The number of inputs of a module whose parameter was emptied."""
    # A layer that every rank has whole has no partition.
    return getattr(module, "input_size_per_partition", None) or module.input_size


@torch.no_grad()
def _computes_with(method: Method, module: Any, weight: torch.Tensor) -> bool:
    """Whether every column of the product is the weight's."""
    if not weight.numel():
        return False
    if count_not_finite(weight) or _is_kernel(method):
        return True  # the parameter's record reports what is not finite
    at = 0
    with _exact():
        for block in _one_hot(weight.shape[1], weight):
            columns, here = _product(method, module, block), weight[:, at : at + len(block)].T
            if columns.shape != here.shape or not bool((columns == here).all()):
                return False
            at += len(block)
    return True


def _is_kernel(method: Method) -> bool:
    """Whether our kernels compute the product. They read the parameter itself, and round entries
    that are small beside the others of a row, in a product with the identity too."""
    owner, name = method
    return str(getattr(owner, name).__module__).startswith("rlk_kernels.")


def _product(method: Method, module: Any, rows: torch.Tensor) -> torch.Tensor:
    owner, name = method
    product: torch.Tensor = getattr(owner, name)(module, rows, None)
    return product


def _one_hot(width: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """The identity, some rows at a time."""
    for first in range(0, width, COLUMNS):
        rows = torch.arange(first, min(first + COLUMNS, width), device=like.device)
        yield torch.nn.functional.one_hot(rows, width).to(like.dtype)


@contextmanager
def _exact() -> Iterator[None]:
    """Products of float32 without TensorFloat-32, which would round the weight."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(usual)
