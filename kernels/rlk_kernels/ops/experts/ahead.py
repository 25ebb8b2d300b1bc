"""Compiling the kernels of a sparse layer before a request of an engine waits for them."""

from collections.abc import Collection

import torch
from torch import Tensor

from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.ops.combine.operator import combine_experts
from rlk_kernels.ops.experts.operator import group_by_expert, grouped_linear, grouped_swiglu
from rlk_kernels.ops.routing.operator import route


def warm_up_experts(
    gate_up: Tensor, down: Tensor, *, experts_per_token: int, normalize: bool,
    tokens: Collection[int], wait: bool = True,
) -> None:  # fmt: skip
    """Compile, several kernels at a time, what `route`, `group_by_expert`, `grouped_swiglu`,
    `grouped_linear` and `combine_experts` will launch, without gradients, for gate_up[E, 2 I, H]
    and down[E, H', I'], each number of `tokens`, and ids that `route` chooses.

    I' and H' may differ from I and H, because ranks gather rows between the products. The torch
    backend has nothing to compile, and nothing is compiled while a CUDA graph is captured. Without
    `wait`, threads continue to compile, and a launch waits for its own kernel.
    """
    if choose("warm_up_experts", None, gate_up, down) == "torch":
        return
    experts, out, inner = down.shape
    with on_device_of(gate_up), torch.no_grad(), compiled_ahead(gate_up.device, wait) as ahead:
        most = max(tokens, default=0) if ahead else 0
        x = gate_up.new_empty(most, gate_up.shape[2])
        act = gate_up.new_empty(most, experts_per_token, inner)
        rows = gate_up.new_empty(most, experts_per_token, out)
        logits = gate_up.new_empty(most, experts, dtype=torch.float32)
        for t in tokens if ahead else ():
            weights, ids = route(logits[:t], experts_per_token, normalize=normalize)
            groups = group_by_expert(ids, experts)
            grouped_swiglu(x[:t], gate_up, groups)
            grouped_linear(act[:t], down, groups)
            combine_experts(rows[:t], weights, ids, experts)
