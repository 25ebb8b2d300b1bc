"""What the experts of a sparse layer compute, as rows of tokens.

A token is sent to K experts, and its row holds a slot for each of them, by ascending id: whatever
order an engine computes them in, equal choices make equal rows.
T = tokens, K = experts of a token, S = rows of experts, F = features
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
"""Scores `[T, E]` and the choice by them, ids `[T, K]` -> the experts that are computed."""


@contextmanager
def choice_replaced(choose: Choose, experts: int) -> Iterator[list[int]]:
    """While entered, `torch.topk` picks the experts that `choose` gives in place of its own, so
    that an engine computes their weights as it computes all weights. Of calls that pick something
    else, such as groups, nothing changes. Yields a list that grows by one entry with each choice
    among this many `experts`."""
    original = torch.topk
    calls: list[int] = []

    @functools.wraps(original)
    def topk(scores: torch.Tensor, *args: Any, **more: Any) -> Any:
        if scores.dim() != 2 or scores.shape[1] != experts:
            return original(scores, *args, **more)
        calls.append(len(scores))
        chosen = choose(scores, original(scores, *args, **more)[1])
        return scores.gather(1, chosen), chosen

    torch.topk = topk
    try:
        yield calls
    finally:
        torch.topk = original


BY_EXPERT = ("gate_proj", "up_proj", "act", "down_proj")
"""The operators by expert."""
INSIDE = ("experts", "routing_weights", *BY_EXPERT)
"""What the kernels compute inside of a sparse layer, behind its router."""


def has_kernels(module: Any) -> bool:
    """Whether the kernels compute a sparse layer, or that part of one: they show its inside."""
    return hasattr(module, "rlk_show")


def on_kernels(hooks: Hooks, module: Any, layer: int, show: Show) -> None:
    """`show(site, value)` of what the kernels compute inside of a sparse layer."""
    hooks.replace(module, "rlk_show", functools.partial(_of_layer, layer, show))


def choose_on_kernels(hooks: Hooks, module: Any, choose: Choose) -> None:
    """Has the kernels of a sparse layer compute the experts that `choose` gives. What was planted
    there before chooses first."""
    before: Choose | None = module.rlk_choose

    def both(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return choose(scores, chosen if before is None else before(scores, chosen))

    hooks.replace(module, "rlk_choose", both)


def _of_layer(layer: int, show: Show, operator: str, value: torch.Tensor) -> None:
    show(f"layers.{layer}.{operator}", value)


def by_ascending_id(
    chosen: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int32 `[T, K]`, ascending, and their weights in that order."""
    ids, order = chosen.long().sort(dim=1)
    return ids.int(), weights.gather(1, order)


def slots(rows: torch.Tensor, token: torch.Tensor, expert: torch.Tensor, k: int) -> torch.Tensor:
    """Rows `[S, F]` of experts, each of a token and an expert, int64 `[S]`, as `[T, K · F]`."""
    order = torch.argsort(token * (int(expert.max()) + 1) + expert)
    return rows[order].reshape(len(rows) // k, -1)
