"""A sparse layer as every engine computes it, by `profile`, and its intermediate values.

T = tokens   H = hidden size   E = experts   k = experts of a token   I = inner size of an expert
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.parallel.copies import size_of
from rlk_kernels.parallel.experts import experts_parallel

INSIDE = ("gate_proj", "up_proj", "act", "down_proj")
"""What is computed for each expert of a token, in order."""


class Sparse(Counted):
    """A sparse layer of an engine, or a part of one."""

    rlk_show: Callable[[str, Tensor], None] | None = None
    """Called with intermediate values that no module returns, by operator, `[T, F]`: a token's
    experts, their weights, and their rows, one after another, in the order of their ids; of rows
    this rank's columns."""
    rlk_choose: Callable[[Tensor, Tensor], Tensor] | None = None
    """Given the scores [T, E] that experts are chosen by and the choice [T, k], says which experts
    are computed, int64 [T, k]; they are weighed as if they had been the choice."""
    rlk_weigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Given logits [T, E], experts [T, k] and their weights [T, k], says what they are weighed
    by."""

    def show(self, operator: str, value: Tensor) -> None:
        if self.rlk_show is not None and not torch.compiler.is_compiling():
            self.rlk_show(operator, value.flatten(1))

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """The router's, fp32 [T, E] of x[T, H]."""
        return profile.router(x, weight)

    def choose(
        self, logits: Tensor, k: int, normalize: bool,
        correction: profile.Correction | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(weights[T, k], ids int32 [T, k]) of logits[T, E]; by a softmax, or by corrected scores
        of a sigmoid."""
        if correction is None:
            weights, ids = profile.route(logits, k, normalize)
        else:
            weights, ids = profile.route_corrected(logits, k, normalize, correction)
        if self.rlk_choose is not None:
            scores = logits if correction is None else logits.sigmoid() + correction.bias
            ids = self.rlk_choose(scores, ids.long()).sort(dim=1).values.int()
            weights = profile.weights_of(logits, ids, normalize, correction)
        if self.rlk_weigh is not None:
            weights = self.rlk_weigh(logits, ids, weights)
        self.show("experts", ids)
        self.show("routing_weights", weights)
        return weights, ids

    def compute(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor,
        ranks: ProcessGroup | None = None,
    ) -> Tensor:  # fmt: skip
        """The layer's output [T, H] of x[T, H]; gate_up[E, 2 I, H], down[E, H, I]: with `ranks`,
        this rank's experts of those that all of them share; where `columns` gathers, this rank's
        outputs of all experts, gate_up[E, 2 I / R, H] and down[E, H / R, I]."""
        experts, inner = len(gate_up) * size_of(ranks), gate_up.shape[1] // 2

        def here(rows: Tensor, local: Tensor) -> tuple[Tensor, ...]:
            return self._rows(rows, local, gate_up, down)

        if size_of(ranks) == 1:
            inside = here(x, ids)
        elif self.rlk_show is None:
            inside = (experts_parallel(x, ids, experts, ranks, lambda *rows: here(*rows)[-1]),)
        else:
            # What is shown of a token's rows travels back with them.
            sizes = inner, inner, inner, x.shape[1]
            every = experts_parallel(
                x, ids, experts, ranks, lambda *rows: torch.cat(here(*rows), dim=-1)
            )
            inside = tuple(part.contiguous() for part in every.split(sizes, dim=-1))
        for operator, value in zip(INSIDE[-len(inside) :], inside, strict=True):
            self.show(operator, value)
        return self.columns(profile.combine(inside[-1], weights, ids, experts))

    def columns(self, x: Tensor) -> Tensor:
        """[..., R F]: this rank's columns x[..., F] beside those of the others, where R ranks have
        each some outputs of all products by expert."""
        return x

    def _rows(self, x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        """The rows that `INSIDE` names, for each expert of a token: [T, k, I] each, and [T, k, H];
        this rank's columns of them. Only the last one where nothing is trained or shown."""
        groups = profile.expert_groups(ids, len(gate_up))
        if self.rlk_show is None and not torch.is_grad_enabled():
            act = profile.expert_act(x, gate_up, groups)
            return (profile.expert_linear(self.columns(act), down, groups),)
        gate, up = profile.expert_linear(x, gate_up, groups).chunk(2, dim=-1)
        inner = profile.act(gate, up)
        return gate, up, inner, profile.expert_linear(self.columns(inner), down, groups)
