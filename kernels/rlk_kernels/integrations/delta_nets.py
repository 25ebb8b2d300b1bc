"""A gated delta net as every engine computes it with the kernels, and its intermediate values.

T = rows   F = features of q, k and v   Hv = heads of v   E = features of one of them
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.operators import Counted


class Shown(Counted):
    """A part of an engine that shows values which no module returns."""

    rlk_show: Callable[[str, Tensor], None] | None = None
    """Called with (operator, value `[..., features]`) for each such value; it may overwrite the
    value in place, and the part computes on with it."""

    def show(self, operator: str, value: Tensor) -> None:
        if self.rlk_show is not None and not torch.compiler.is_compiling():
            self.rlk_show(operator, value)


class DeltaNetCore(Shown):
    """The part of a gated delta net between its products and its norm."""

    rlk_eps = profile.L2_EPS
    """What is added to the sum of squares of a head of q or k."""
    rlk_chunk = profile.DELTA_CHUNK
    """The rows of a chunk."""

    def rlk_core(
        self, net: profile.DeltaNet, mixed: Tensor, a: Tensor, b: Tensor, cu: Tensor,
        kept: profile.Kept | None = None, order: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, Hv, E]: what a gated delta net reads of its state for packed sequences, mixed[T, F],
        a and b[T, Hv]. `kept`: rows continue sequences, without a gradient. order (int64 [T]): the
        indices of the given rows in the order of the packed ones; None if they are in it."""
        back = None if order is None else order.argsort()

        def packed(x: Tensor) -> Tensor:
            return x if order is None else x.index_select(0, order)

        def as_given(x: Tensor) -> Tensor:
            return x if back is None else x.index_select(0, back)

        g, beta = profile.delta_gates(net, a, b)
        self.show("decay", g)
        self.show("beta", beta)
        convolved = as_given(self.rlk_convolve(net, packed(mixed), cu, kept))
        self.show("conv", convolved)
        return as_given(self.rlk_rule(net, *map(packed, (convolved, g, beta)), cu, kept))

    def rlk_convolve(
        self, net: profile.DeltaNet, mixed: Tensor, cu: Tensor, kept: profile.Kept | None
    ) -> Tensor:
        """[T, F] of packed rows."""
        return profile.short_conv(net, mixed, cu, kept)

    def rlk_rule(
        self, net: profile.DeltaNet, convolved: Tensor, g: Tensor, beta: Tensor, cu: Tensor,
        kept: profile.Kept | None,
    ) -> Tensor:  # fmt: skip
        """[T, Hv, E] of packed rows."""
        return profile.delta_rule(net, convolved, g, beta, cu, kept)
