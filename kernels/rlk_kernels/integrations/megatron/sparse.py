"""The sparse layer of the layer spec. S = length, B = sequences, activations `[S, B, H]`;
E = experts of this rank."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.megatron.layers import GatedMLP
from rlk_kernels.integrations.megatron.limits import check_config


def make_contiguous(weights: Sequence[Tensor]) -> None:
    """Moves parameters of one shape into a single block of memory, one after another."""
    whole = torch.stack([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole, strict=True):
        weight.data = part


class Stacked(torch.autograd.Function):
    """[E, ...] of E parameters of one shape, of which megatron-core has one for each expert. This
    copies nothing if they are contiguous, as after `make_contiguous`, and copies them if they were
    moved since, for example by an optimizer into a buffer of its own."""

    @staticmethod
    def forward(_ctx: Any, *weights: Tensor) -> Tensor:
        first = weights[0]
        step = first.numel() * first.element_size()
        storage = first.untyped_storage()
        contiguous = all(
            weight.untyped_storage().data_ptr() == storage.data_ptr()
            and weight.data_ptr() == first.data_ptr() + i * step
            and weight.is_contiguous()
            for i, weight in enumerate(weights)
        )
        if not contiguous:
            return torch.stack(weights)
        shape = (len(weights), *first.shape)
        return first.new_empty(0).set_(storage, first.storage_offset(), shape)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.unbind(0)


class SharedMLP(GatedMLP, SharedExpertMLP):
    """The experts that process every token. Like an MLP, this returns its output and a bias, which
    is None."""


class SparseMLP(Sparse, MoELayer):
    """Computes with the parameters of its router and its experts, and calls neither them nor the
    dispatcher. Ranks that share experts exchange rows by `rlk_kernels.parallel.experts`. Experts
    that process every token are called as modules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_config(self.config)
        for weights in self._weights():
            make_contiguous(weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A cast or a move creates separate tensors. Parameters that stay where they are may lie in
        # an optimizer's buffer.
        before = [[w.data_ptr() for w in weights] for weights in self._weights()]
        super()._apply(fn, recurse)
        for weights, where in zip(self._weights(), before, strict=True):
            if all(w.data_ptr() != at for w, at in zip(weights, where, strict=True)):
                make_contiguous(weights)
        return self

    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The first and the second weight of every expert."""
        experts = self.experts.local_experts
        return [e.linear_fc1.weight for e in experts], [e.linear_fc2.weight for e in experts]

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> tuple[Tensor, None]:
        # The mask excludes padding from the router's losses, and changes no value here.
        if intermediate_tensors is not None:
            raise NotSupported("a sparse layer with intermediate_tensors is not supported")
        self.count()
        config, router = self.config, self.router
        if self.training and (router.is_aux_loss_enabled() or config.moe_z_loss_coeff is not None):
            raise NotSupported(
                "a router's losses inside the layer are not supported: add "
                "rlk_kernels.load_balancing_loss and router_z_loss to the model's loss"
            )
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.logits(x, router.weight)
        self.show("router", logits)
        weights, ids = self._route(logits, padding_mask)
        gate_up, down = (Stacked.apply(*weights) for weights in self._weights())
        y = self.compute(x, weights, ids, gate_up, down, self.ep_group).view(hidden_states.shape)
        if self.shared_experts is not None:
            y = profile.add_shared(y, self.shared_experts(hidden_states)[0])
        return y, None

    def _route(self, logits: Tensor, padding_mask: Any) -> tuple[Tensor, Tensor]:
        config, router = self.config, self.router
        if router.expert_bias is None:
            return self.choose(logits, router.topk, not config.moe_router_pre_softmax)
        router._maintain_float32_expert_bias()
        groups = config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
        scale = config.moe_router_topk_scaling_factor or 1.0
        correction = profile.Correction(router.expert_bias, *groups, scale)
        weights, ids = self.choose(logits, router.topk, True, correction)
        if torch.is_grad_enabled():
            # Trainers correct the bias by these counts.
            sent = ids if padding_mask is None else ids[~padding_mask.bool().t().reshape(-1)]
            counts = torch.bincount(sent.flatten(), minlength=logits.shape[1])
            router.local_tokens_per_expert += counts
        return weights, ids
