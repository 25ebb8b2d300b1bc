"""The values that the experts of a sparse layer compute, as rows of tokens.

A token is sent to K experts, and its row has a slot for each of them, by ascending id. Equal
choices thus give equal rows, in whatever order an engine computes the experts.
T = tokens, K = experts of a token, E = experts, S = rows of experts, F = features
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks

Show = Callable[[str, torch.Tensor], None]
"""Takes the value of a site."""
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Scores `[T, E]` and the choice by these scores, ids `[T, K]` -> the experts that are computed."""


@contextmanager
def choice_replaced(choose: Choose, experts: int) -> Iterator[list[int]]:
    """While entered, `torch.topk` returns the experts that `choose` returns, so that an engine
    computes their weights in its usual way. Calls that choose something else, such as groups, are
    unchanged. Yields a list that grows by one entry with each choice among this many `experts`."""
    original, method = torch.topk, vars(torch.Tensor).get("topk")
    calls: list[int] = []

    @functools.wraps(original)
    def topk(scores: torch.Tensor, *args: Any, **more: Any) -> Any:
        if scores.dim() != 2 or scores.shape[1] != experts:
            return original(scores, *args, **more)
        calls.append(len(scores))
        chosen = choose(scores, original(scores, *args, **more)[1])
        return scores.gather(1, chosen), chosen

    def of_tensor(scores: torch.Tensor, *args: Any, **more: Any) -> Any:
        return topk(scores, *args, **more)

    torch.topk, torch.Tensor.topk = topk, of_tensor
    try:
        yield calls
    finally:
        torch.topk = original
        if method is None:
            # The usual method is inherited.
            del torch.Tensor.topk
        else:
            torch.Tensor.topk = method


BY_EXPERT = ("gate_proj", "up_proj", "act", "down_proj")
"""The operators that each expert computes."""
INSIDE = ("experts", "routing_weights", *BY_EXPERT)
"""The operators inside a sparse layer, after its router."""


PRODUCTS = ("gate_proj", "up_proj", "down_proj")
"""Those of them that have weights."""


def gate_and_up(
    fused: torch.Tensor, dim: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves of a fused product or weight along `dim`, or its entries in turn."""
    halves = fused.chunk(2, dim)
    if interleaved:
        halves = fused.unflatten(dim, (-1, 2)).movedim(dim % fused.dim() + 1, 0)
    return halves[0], halves[1]


def router_path(block: Any) -> str:
    """The name of the router in a block of experts."""
    return "gate" if hasattr(block, "gate") else "router"


def has_kernels(module: Any) -> bool:
    """Whether the kernels compute a part of a sparse or a hybrid layer, and show values inside
    it."""
    return hasattr(module, "rlk_show")


def on_kernels(hooks: Hooks, module: Any, layer: int, show: Show) -> None:
    """Calls `show(site, value)` with each value that the kernels compute inside a sparse layer."""

    def show_operator(operator: str, value: torch.Tensor) -> None:
        show(f"layers.{layer}.{operator}", value)

    hooks.replace(module, "rlk_show", show_operator)


def choose_on_kernels(hooks: Hooks, module: Any, choose: Choose) -> None:
    """Makes the kernels of a sparse layer compute the experts that `choose` returns; it gets the
    choice of a function that was installed before."""
    before: Choose | None = module.rlk_choose

    def both(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return choose(scores, chosen if before is None else before(scores, chosen))

    hooks.replace(module, "rlk_choose", both)


def by_ascending_id(
    chosen: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int32 `[T, K]`, ascending, and their weights in that order."""
    ids, order = chosen.long().sort(dim=1)
    return ids.int(), weights.gather(1, order)


def slots(rows: torch.Tensor, token: torch.Tensor, expert: torch.Tensor, k: int) -> torch.Tensor:
    """`[T, K · F]` of experts' rows `[S, F]`, with their tokens and experts, int64 `[S]`."""
    order = torch.argsort(token * (int(expert.max()) + 1) + expert)
    return rows[order].reshape(len(rows) // k, -1)
