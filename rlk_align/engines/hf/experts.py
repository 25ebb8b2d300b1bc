"""The inner values of the sparse layers of an HF decoder: the choice of each token's experts, and
the experts' rows.

transformers computes experts by `eager`, `batched_mm` or `grouped_mm`. Each makes two products with
its own function, which is wrapped while the hooks are installed.
T = tokens, K = experts of a token, S = T · K
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlk_align.engines.common.experts import (
    BY_EXPERT,
    PRODUCTS,
    Choose,
    Show,
    by_ascending_id,
    choice_replaced,
    choose_on_kernels,
    gate_and_up,
    has_kernels,
    on_kernels,
    router_path,
    slots,
)
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Access
from rlk_align.engines.common.site_hooks import SiteHooks

OTHER_ROWS = (
    "its experts did not compute their rows in the order that experts={} prescribes, so the token "
    "of each row is unknown"
)

UNSEEN = "its experts={} multiplies by no function that can be observed"


def mlp_path(layer: Any) -> str:
    """The name of a layer's MLP or of its block of experts, or of the one part that it has."""
    names = ("mlp", "block_sparse_moe", "shared_mlp", "feed_forward", "mixer")
    return next(name for name in names if getattr(layer, name, None) is not None)


def router_of(block: Any) -> Any:
    """The router of a block of experts."""
    return getattr(block, router_path(block))


def routing(output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, weights, chosen experts) in the output of a router, which has them in this order or
    in the reverse one."""
    first, weights, last = output
    return (first, weights, last) if first.is_floating_point() else (last, weights, first)


ROUTER = Access(
    lambda output: routing(output)[0], lambda output: routing(output)[0], lambda output: output
)
"""The logits in the output of a router."""


def sparse_blocks(model: Any) -> Iterator[tuple[int, Any]]:
    """(index of the layer, its block of experts) of each sparse layer."""
    for i, layer in enumerate(model.model.layers):
        block = getattr(layer, mlp_path(layer))
        if hasattr(block, "experts"):
            yield i, block


def expert_weights(
    model: Any, gathered: Callable[..., AbstractContextManager[Any]] = nullcontext
) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical parameters of the experts, which transformers keeps in stacks. Within
    `gathered(parameters)` these parameters are whole."""
    for i, block in sparse_blocks(model):
        with gathered(block.experts.parameters()):
            yield from _of_stacks(f"layers.{i}.experts", block.experts, "")
            if hasattr(block.experts, "gate_up_proj_bias"):
                yield from _of_stacks(f"layers.{i}.experts", block.experts, "_bias")


def _of_stacks(name: str, experts: Any, end: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical parameters of a layer's experts; `end`: that of the names of its stacks."""
    gate_up, down = (_whole(getattr(experts, f"{n}{end}")) for n in ("gate_up_proj", "down_proj"))
    if experts.is_transposed and not end:
        gate_up, down = gate_up.mT, down.mT
    for e, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        values = *gate_and_up(first, 0, not experts.is_concatenated), second
        for op, value in zip(PRODUCTS, values, strict=True):
            yield f"{name}.{e}.{op}{'.bias' if end else ''}", value


def corrections(
    model: Any, gathered: Callable[..., AbstractContextManager[Any]] = nullcontext
) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical corrections of scores for the choice of experts: buffers, which no engine
    rounds, or parameters, which are whole within `gathered(parameters)`."""
    for i, block in sparse_blocks(model):
        for holder in block.modules():
            if not hasattr(holder, "e_score_correction_bias"):
                continue
            with gathered(holder.parameters(recurse=False)):
                yield f"layers.{i}.experts", holder.e_score_correction_bias.detach()


def _whole(stacked: torch.Tensor) -> torch.Tensor:
    """The whole of a stack of experts, which the ranks may share."""
    value = stacked.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def on_experts(hooks: Hooks, model: Any, show: Show, unexposed: dict[str, str]) -> None:
    """Calls `show(site, value)` with each value that a sparse layer computes between its router and
    its output. Adds sites whose rows cannot be identified to `unexposed`, with the reason."""
    running = _RunningExperts(show, unexposed)
    blocks = []
    for i, block in sparse_blocks(model):
        hooks.after(router_of(block), functools.partial(_show_choice, show, i))
        if has_kernels(block.experts):
            on_kernels(hooks, block.experts, i, show)
        else:
            blocks.append((i, block))
    for i, block in blocks:
        hooks.before(block.experts, functools.partial(running.begin, i))
        hooks.after(block.experts, running.end)
    if not blocks:
        return
    from transformers.integrations import moe

    for owner, name in (
        (moe, "_grouped_linear"),
        (moe, "_batched_linear"),
        (torch.nn.functional, "linear"),
    ):
        hooks.replace(owner, name, running.observed(getattr(owner, name)))


def replay_choices(hooks: SiteHooks, model: Any) -> None:
    """Makes the routers whose choice is overwritten choose the recorded experts."""
    for i, block in sparse_blocks(model):
        choose = hooks.recorded_choice(f"layers.{i}.experts")
        if choose is not None:
            replace_choice(hooks, block, choose)


def replace_choice(hooks: Hooks, block: Any, choose: Choose) -> None:
    """Replaces the choice of a router: one of the kernels, or one that calls `torch.topk` and
    computes weights for its result."""
    router = router_of(block)
    if has_kernels(router):
        choose_on_kernels(hooks, router, choose)
        return
    route, experts = router.forward, len(router.weight)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with choice_replaced(choose, experts):
            return route(*args, **kwargs)

    hooks.replace(router, "forward", forward)


# Without gradients, because a checkpoint of activations counts the tensors that a forward saves.
@torch.no_grad()
def _show_choice(show: Show, layer: int, _module: Any, _inputs: Any, output: Any) -> None:
    _, weights, chosen = routing(output)
    ids, weights = by_ascending_id(chosen, weights)
    show(f"layers.{layer}.experts", ids)
    show(f"layers.{layer}.routing_weights", weights)


class _RunningExperts:
    """Collects the products of the experts of the layer that is running."""

    def __init__(self, show: Show, unexposed: dict[str, str]) -> None:
        self._show, self._unexposed = show, unexposed
        self._layer: int | None = None

    def begin(self, layer: int, module: Any, inputs: Any) -> None:
        self._layer, self._hidden, self._chosen = layer, inputs[0], inputs[1].long()
        self._kind = module.config._experts_implementation
        self._interleaved = not module.is_concatenated
        self._products: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observed(self, product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The product, which also keeps its input and output while experts are computed."""

        @functools.wraps(product)
        def observed(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out = product(x, *args, **kwargs)
            if self._layer is not None:
                # transformers may write to the output afterwards.
                self._products.append((x.detach(), out.detach().clone()))
            return out

        return observed

    @torch.no_grad()
    def end(self, *_: Any) -> None:
        name, self._layer = f"layers.{self._layer}", None
        token, expert = self._order()
        if not self._in_order(token, expert):
            reason = (OTHER_ROWS if self._products else UNSEEN).format(self._kind)
            self._unexposed |= {f"{name}.{op}": reason for op in BY_EXPERT}
            return
        # Two products: of all experts, or of one expert after another.
        parts = [[torch.cat(x) for x in zip(*self._products[n::2], strict=True)] for n in (0, 1)]
        (_, gate_up), (act, down) = parts
        gate, up = gate_and_up(gate_up, 1, self._interleaved)
        k = self._chosen.shape[1]
        for op, rows in zip(BY_EXPERT, (gate, up, act, down), strict=True):
            self._show(f"{name}.{op}", slots(rows, token, expert, k))

    def _in_order(self, token: torch.Tensor, expert: torch.Tensor) -> bool:
        """Whether the products belong to these rows: two for each block of rows, the first of which
        reads the hidden states of its tokens."""
        blocks = [len(token)]
        if self._kind == "eager":
            blocks = expert.unique_consecutive(return_counts=True)[1].tolist()
        rows = [len(x) for x, _ in self._products]
        if rows != [size for size in blocks for _ in range(2)]:
            return False
        x = torch.cat([x for x, _ in self._products[::2]])
        own = self._hidden[token]
        # Compared bit for bit, because a token's hidden state may be NaN.
        return torch.equal(x.contiguous().view(torch.uint8), own.view(torch.uint8))

    def _order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The token and the expert of each row of a product, as transformers orders them."""
        tokens, k = self._chosen.shape
        flat = self._chosen.reshape(-1)
        if self._kind == "eager":
            # By expert, then by its index in the token's choice, then by token.
            by_index = self._chosen.T.reshape(-1)
            order = torch.argsort(by_index, stable=True)
            return order % tokens, by_index[order]
        if self._kind == "grouped_mm":
            expert, order = torch.sort(flat)
            return order // k, expert
        return torch.arange(len(flat), device=flat.device) // k, flat
