"""The sparse layers of megatron-core's GPTModel: the values that can be observed, and their
parameters.

Experts are computed one after another, each on its tokens in their order (`SequentialMLP`). The
weight of an expert multiplies its activation before the second product, so the values from there on
are not the canonical ones.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.experts import (
    INSIDE,
    Choose,
    Show,
    by_ascending_id,
    choose_on_kernels,
    has_kernels,
    on_kernels,
    slots,
)
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.layout import even, fused, whole
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.engines.common.weights import Parameter
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.errors import EngineFailed
from rlk_align.model.shape import ModelShape

WEIGHTED = "Megatron multiplies the activation by the expert's weight, before the second product"


def sparse_places(name: str, mlp: str, kernels: bool) -> Iterator[Place]:
    """The places of a sparse layer's operators, from the router to the sum; `kernels`: whether our
    kernels compute all of the layer."""
    if kernels:
        for op in ("router", *INSIDE):
            yield Place(sites=(f"{name}.{op}",), module=mlp, end="inside")
        yield Place(sites=(f"{name}.moe_out",), module=mlp)
        return
    for op in ("router", "experts", "routing_weights"):
        yield Place(sites=(f"{name}.{op}",), module=f"{mlp}.router", end="inside")
    for op in ("gate_proj", "up_proj"):
        yield Place(sites=(f"{name}.{op}",), module=f"{mlp}.experts", end="inside")
    for op in ("act", "down_proj"):
        site = (f"{name}.{op}",)
        yield Place(sites=site, module=f"{mlp}.experts", end="inside", unexposed=WEIGHTED)
    yield Place(sites=(f"{name}.moe_out",), module=mlp)


def expert_parameters(shape: ModelShape) -> Iterator[Parameter]:
    """The parameters of the sparse layers, separate for each expert."""
    for i in shape.sparse_layers:
        name, mlp = f"layers.{i}", f"decoder.layers.{i}.mlp"
        router = whole(f"{name}.router", shape.experts, 1)
        yield Parameter(f"{mlp}.router.weight", router, None)
        if shape.family.sigmoid:
            correction = whole(f"{name}.experts", shape.experts, 1)
            yield Parameter(f"{mlp}.router.expert_bias", correction, None)
        for e in range(shape.experts):
            of, expert = f"{name}.experts.{e}", f"{mlp}.experts.local_experts.{e}"
            halves = (even(f"{of}.{op}", shape.expert_intermediate, 1) for op in _FIRST)
            yield Parameter(f"{expert}.linear_fc1.weight", fused(*halves), 0)
            down = whole(f"{of}.down_proj", shape.hidden, 1)
            yield Parameter(f"{expert}.linear_fc2.weight", down, None)


_FIRST = ("gate_proj", "up_proj")


def routers(model: Any) -> list[Any]:
    """The routers of the sparse layers."""
    return [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]


def corrections(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of the corrections of the scores for the choice of experts: buffers, which
    trainers update and keep in float32 whatever the model's dtype is."""
    for layer, module in enumerate(model.decoder.layers):
        router = getattr(module.mlp, "router", None)
        if router is not None and router.expert_bias is not None:
            router._maintain_float32_expert_bias()
            yield f"decoder.layers.{layer}.mlp.router.expert_bias", router.expert_bias


def routing(model: Any) -> dict[str, list[Any]]:
    """For each sparse layer, the number of experts of a token and whether their weights are divided
    by their sum; for routers that correct scores, also their groups and scale."""
    every = routers(model)
    configs = [r.config for r in every if r.expert_bias is not None]
    return {
        "experts_per_token": [r.topk for r in every],
        "norm_topk_prob": [not r.config.moe_router_pre_softmax for r in every],
        "expert_groups": [c.moe_router_num_groups or 1 for c in configs],
        "expert_groups_chosen": [c.moe_router_group_topk or 1 for c in configs],
        "expert_weight_scale": [
            float(f"{c.moe_router_topk_scaling_factor or 1.0:.6g}") for c in configs
        ],
    }


def on_experts(hooks: SiteHooks, model: Any, ranks: Ranks) -> None:
    """Exposes the values that a sparse layer computes between its router and its output, and makes
    the routers whose choice is overwritten choose the recorded experts. `ranks`: those that share
    experts, all of which call this."""
    for layer in model.decoder.layers:
        i = layer.layer_number - 1
        choose = hooks.recorded_choice(f"layers.{i}.experts")
        if has_kernels(layer.mlp):
            on_kernels(hooks, layer.mlp, i, hooks.show)
            if choose is not None:
                choose_on_kernels(hooks, layer.mlp, choose)
        elif hasattr(layer.mlp, "router"):
            _Layer(i, hooks.show, choose, ranks).watch(hooks, layer.mlp)


class _Layer:
    """One sparse layer. megatron-core's RouterReplay records or replaces the choice of its router.
    T = tokens, E = experts."""

    def __init__(self, layer: int, show: Show, choose: Choose | None, ranks: Ranks) -> None:
        self._name, self._show, self._choose = f"layers.{layer}", show, choose
        self._ranks = ranks
        self._first: list[torch.Tensor] = []

    def watch(self, hooks: Hooks, mlp: Any) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        self._replay = RouterReplay()
        hooks.callback(RouterReplay.global_router_replay_instances.remove, self._replay)
        hooks.replace(mlp.router, "router_replay", self._replay)
        action = (
            RouterReplayAction.RECORD if self._choose is None else RouterReplayAction.REPLAY_FORWARD
        )
        self._replay.set_router_replay_action(action)
        gating = mlp.router.gating

        @functools.wraps(gating)
        def observed(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = gating(*args, **kwargs)
            logits_TE = logits.reshape(-1, logits.shape[-1])
            self._show(f"{self._name}.router", logits_TE)
            if self._choose is not None:
                self._replay.clear_indices()
                chosen_TK = self._choose(logits_TE, logits_TE.topk(mlp.router.topk).indices)
                self._replay.set_target_indices(chosen_TK)
            return logits

        hooks.replace(mlp.router, "gating", observed)
        hooks.after(mlp.router, self._chosen)
        for expert in mlp.experts.local_experts:
            hooks.on_output(expert.linear_fc1, lambda out: self._first.append(out[0]))
        hooks.after(mlp.experts, self._computed)

    @torch.no_grad()
    def _chosen(self, router: Any, _inputs: Any, output: Any) -> None:
        weights_TE, sent_TE = output
        self._sent, self._k = sent_TE, router.topk
        if bool((sent_TE.sum(dim=1) != self._k).any()):
            raise EngineFailed(
                f"{self._name}: Megatron did not send every token to {self._k} experts",
                "check the patch, and leave the capacity of experts unlimited",
            )
        _, expert = sent_TE.nonzero(as_tuple=True)
        ids_TK = expert.reshape(len(sent_TE), -1)
        replay = self._replay
        own = replay.target_topk_idx if self._choose else replay.get_recorded_indices()
        if own is None or not torch.equal(own.sort(dim=1).values, ids_TK):
            raise EngineFailed(
                f"{self._name}: Megatron computes other experts than its RouterReplay has",
                "check the patch of the router",
            )
        ids, weights = by_ascending_id(ids_TK, weights_TE.gather(1, ids_TK))
        self._show(f"{self._name}.experts", ids)
        self._show(f"{self._name}.routing_weights", weights)

    @torch.no_grad()
    def _computed(self, *_: Any) -> None:
        rows, self._first = torch.cat(self._first), []
        rows, token, expert = own_rows(rows, self._sent, self._ranks)
        for op, part in zip(_FIRST, rows.chunk(2, dim=1), strict=True):
            self._show(f"{self._name}.{op}", slots(part, token, expert, self._k))


def own_rows(
    rows: torch.Tensor, sent_TE: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of experts that belong to this rank's tokens, with the token and the expert of each.

    `rows`: the rows of this rank's experts, one expert after another, for the tokens of all ranks,
    one rank after another; `sent_TE`: bool, the experts to which each of this rank's tokens goes.
    Called on all of these ranks.
    """
    share = sent_TE.shape[1] // ranks.world
    counts = torch.tensor([len(sent_TE)], device=sent_TE.device)
    tokens = [int(count) for count in all_gather(counts, ranks)]
    first = sum(tokens[: ranks.rank])
    padded = sent_TE.new_zeros(max(tokens), sent_TE.shape[1])
    padded[: len(sent_TE)] = sent_TE
    parts = zip(all_gather(padded.byte(), ranks), tokens, strict=True)
    every = torch.cat([part[:count] for part, count in parts]).bool()
    sent = [
        every[:, r * share : (r + 1) * share].T.nonzero(as_tuple=True) for r in range(ranks.world)
    ]
    most = max(len(token) for _, token in sent)
    filled = rows.new_zeros(most, rows.shape[1])
    filled[: len(rows)] = rows
    parts_of_ranks = []
    for r, (of_rank, (expert, token)) in enumerate(
        zip(all_gather(filled, ranks), sent, strict=True)
    ):
        here = token - first
        own = ((here >= 0) & (here < len(sent_TE))).nonzero(as_tuple=True)[0]
        parts_of_ranks.append((of_rank[own], here[own], expert[own] + r * share))
    return tuple(torch.cat(parts) for parts in zip(*parts_of_ranks, strict=True))
