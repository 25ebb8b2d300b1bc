"""A sparse layer as every engine computes it with the kernels, and its intermediate values.

T = tokens   H = hidden size   E = experts   k = experts of a token   I = inner size of an expert
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.parallel.copies import size_of
from rlk_kernels.parallel.experts import experts_parallel

INSIDE = ("gate_proj", "up_proj", "act", "down_proj")
"""The operators that are computed for each expert of a token, in order."""


class Clamped(NamedTuple):
    """What GPT-OSS adds to experts: biases, and a clamped activation. Outputs of gate and up
    alternate, in the weight too."""

    gate_up: Tensor
    """[E, 2 I]."""
    down: Tensor
    """[E, H]."""
    alpha: float
    limit: float


class Sparse(Counted):
    """A sparse layer of an engine, or a part of one."""

    rlk_show: Callable[[str, Tensor], None] | None = None
    """Called with (operator, value `[T, F]`) for intermediate values that no module returns: a
    token's experts, their weights, and their rows, side by side in the order of the experts' ids.
    Of the rows, these are this rank's columns."""
    rlk_choose: Callable[[Tensor, Tensor], Tensor] | None = None
    """Takes the scores [T, E] and the experts [T, k] that they choose; returns the experts that are
    computed instead, int64 [T, k], whose weights are those of a chosen expert."""
    rlk_weigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Takes logits [T, E], experts [T, k] and their weights [T, k]; returns the weights that are
    used instead."""

    def show(self, operator: str, value: Tensor) -> None:
        if self.rlk_show is not None and not torch.compiler.is_compiling():
            self.rlk_show(operator, value.flatten(1))

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The router's logits, fp32 [T, E], for x[T, H]."""
        return profile.router(x, weight, bias)

    def choose(
        self, logits: Tensor, k: int, normalize: bool,
        correction: profile.Correction | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(weights[T, k], ids int32 [T, k]) of the chosen experts, by a softmax of logits[T, E], or
        by a sigmoid with corrected scores."""
        if correction is None:
            weights, ids = profile.route(logits, k, normalize)
        else:
            weights, ids = profile.route_corrected(logits, k, normalize, correction)
        if self.rlk_choose is not None:
            scores = profile.scores_of(logits, correction)
            ids = self.rlk_choose(scores, ids.long()).sort(dim=1).values.int()
            weights = profile.weights_of(logits, ids, normalize, correction)
        if self.rlk_weigh is not None:
            weights = self.rlk_weigh(logits, ids, weights)
        self.show("experts", ids)
        self.show("routing_weights", weights)
        return weights, ids

    def compute(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor,
        ranks: ProcessGroup | None = None, clamped: Clamped | None = None,
    ) -> Tensor:  # fmt: skip
        """The layer's output [T, H] for x[T, H], by gate_up[E, 2 I, H] and down[E, H, I]. With
        `ranks`, these are this rank's experts, which are not `clamped`. If `columns` gathers over R
        ranks, they are this rank's outputs of all experts, gate_up[E, 2 I / R, H] and
        down[E, H / R, I]."""
        experts, inner = len(gate_up) * size_of(ranks), gate_up.shape[1] // 2

        def here(rows: Tensor, local: Tensor) -> tuple[Tensor, ...]:
            return self._rows(rows, local, gate_up, down, clamped)

        if size_of(ranks) == 1:
            inside = here(x, ids)
        elif self.rlk_show is None:
            inside = (experts_parallel(x, ids, experts, ranks, lambda *rows: here(*rows)[-1]),)
        else:
            # The shown values of a token's rows are sent back together with the rows.
            sizes = inner, inner, inner, x.shape[1]
            every = experts_parallel(
                x, ids, experts, ranks, lambda *rows: torch.cat(here(*rows), dim=-1)
            )
            inside = tuple(part.contiguous() for part in every.split(sizes, dim=-1))
        for operator, value in zip(INSIDE[-len(inside) :], inside, strict=True):
            self.show(operator, value)
        return self.whole(profile.combine(inside[-1], weights, ids, experts))

    def columns(self, x: Tensor) -> Tensor:
        """[..., R F]: the columns of all R ranks side by side, of which x[..., F] are this rank's,
        where each rank computes some outputs of all experts."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """The layer's output [T, H] from this rank's columns of it, or the summand of a rank where
        the engine adds up what the ranks return."""
        return self.columns(x)

    def _rows(
        self, x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, clamped: Clamped | None
    ) -> tuple[Tensor, ...]:
        """The rows of the operators in `INSIDE` for each expert of a token, [T, k, I] and, of the
        last one, [T, k, H]; of these rows, this rank's columns. Without training and showing, only
        the last one."""
        groups = profile.expert_groups(ids, len(gate_up))
        if clamped is not None:
            both = profile.expert_linear(x, gate_up, groups, clamped.gate_up)
            gate, up = both[..., ::2], both[..., 1::2]
            inner = profile.clamped_act(gate, up, clamped.alpha, clamped.limit)
            rows = profile.expert_linear(self.columns(inner), down, groups, clamped.down)
            return gate, up, inner, rows
        if self.rlk_show is None and not torch.is_grad_enabled():
            act = profile.expert_act(x, gate_up, groups)
            return (profile.expert_linear(self.columns(act), down, groups),)
        gate, up = profile.expert_linear(x, gate_up, groups).chunk(2, dim=-1)
        inner = profile.act(gate, up)
        return gate, up, inner, profile.expert_linear(self.columns(inner), down, groups)
