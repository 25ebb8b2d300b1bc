"""The sparse layer of the layer spec. S = length, B = sequences, activations `[S, B, H]`."""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.experts import Sparse
from rlk_kernels.integrations.megatron.limits import check_config


class SparseMLP(Sparse, MoELayer):
    """Computes by its router's and its experts' parameters, and calls neither of them, nor the
    dispatcher: ranks that share experts send rows as `rlk_kernels.parallel.experts` says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_config(self.config)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> tuple[Tensor, None]:
        # The mask keeps padding out of the router's losses, and changes no number here.
        if intermediate_tensors is not None:
            raise NotServed("a sparse layer that is computed in parts is not served")
        self.count()
        config, router = self.config, self.router
        if self.training and (router.is_aux_loss_enabled() or config.moe_z_loss_coeff is not None):
            raise NotServed(
                "the losses of a router inside the layer are not served: add "
                "rlk_kernels.load_balancing_loss and router_z_loss to the model's"
            )
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = profile.router(x, router.weight)
        self.show("router", logits)
        weights, ids = self.choose(logits, router.topk, not config.moe_router_pre_softmax)
        # One stack of what megatron-core keeps expert by expert; gradients go back through it.
        experts = self.experts.local_experts
        gate_up = torch.stack([expert.linear_fc1.weight for expert in experts])
        down = torch.stack([expert.linear_fc2.weight for expert in experts])
        y = self.compute(x, weights, ids, gate_up, down, self.ep_group)
        return y.view(hidden_states.shape), None
