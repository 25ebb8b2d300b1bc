"""A sparse layer as every engine computes it, by `profile`, and what it shows of its inside.

T = tokens   H = hidden size   E = experts   k = experts of a token   I = inner size of an expert
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.operators import Counted


class Sparse(Counted):
    """A sparse layer of an engine, or a part of one."""

    rlk_show: Callable[[str, Tensor], None] | None = None
    """Is given what the layer computes on its way and no module gives, by operator, `[T, F]`: a
    token's experts, their weights, and their rows, one behind the other, in the order of their
    ids."""

    def show(self, operator: str, value: Tensor) -> None:
        if self.rlk_show is not None and not torch.compiler.is_compiling():
            self.rlk_show(operator, value.flatten(1))

    def choose(self, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        """(weights[T, k], ids int32 [T, k]) of logits[T, E]."""
        weights, ids = profile.route(logits, k, normalize)
        self.show("experts", ids)
        self.show("routing_weights", weights)
        return weights, ids

    def compute(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """The layer's output [T, H] of x[T, H]; gate_up[E, 2 I, H], down[E, H, I]."""
        groups = profile.expert_groups(ids, len(gate_up))
        gate, up = profile.expert_linear(x, gate_up, groups).chunk(2, dim=-1)
        inner = profile.act(gate, up)
        rows = profile.expert_linear(inner, down, groups)
        for operator, value in (("gate_proj", gate), ("up_proj", up), ("act", inner)):
            self.show(operator, value)
        self.show("down_proj", rows)
        return profile.combine(rows, weights, groups)
