"""The classes that replace those of transformers' modules in each engine that runs their code: HF,
and vLLM for some families."""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.activations import act_of, activation_of
from rlk_kernels.integrations.operators import Counted, mlp_linears


def cast(x: Any) -> Any:
    """A tensor in the dtype of autocast, if autocast is on, or None. With autocast, fp32 weights
    compute like a model of that dtype, residuals included."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class HFLayerNorm(Counted):
    """Subtracts the mean; Cohere's class has no bias, and another name for eps."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        bias = cast(getattr(self, "bias", None))
        return profile.layer_norm(cast(x), cast(self.weight), bias, eps)


class MLP(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.count()
        activation = activation_of(self.act_fn)
        return self.down_proj(profile.act(self.gate_proj(x), self.up_proj(x), activation))


class FusedMLP(Counted):
    """An MLP that computes gate and up by one product, and whose activation has another name."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        activation = activation_of(act_of(self))
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(profile.act(gate, up, activation))


class PlainMLP(Counted):
    """An MLP without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        linears = mlp_linears(self)
        inner = profile.act_alone(linears["up_proj"](x), activation_of(act_of(self)))
        return linears["down_proj"](inner)


def mlp_class(mlp: Any) -> type:
    """The class that replaces that of an MLP."""
    if hasattr(mlp, "gate_up_proj"):
        return FusedMLP
    return MLP if hasattr(mlp, "gate_proj") else PlainMLP
