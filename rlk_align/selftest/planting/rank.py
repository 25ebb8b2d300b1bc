"""What the ranks of tensor parallelism hold of an operator, put together and taken apart again: a
formula sees whole operators, whatever the layout.

N = rows of the forward, F = features of the whole site; `local` is this rank's, rows flattened.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlk_align.engines.common.layout import Layout


def _alone(local: torch.Tensor) -> list[torch.Tensor]:
    return [local]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """One rank among those that share a model."""

    rank: int = 0
    ranks: int = 1
    gather: Callable[[torch.Tensor], list[torch.Tensor]] = _alone
    """The tensors of all ranks, equal in shape, in rank order, on every rank."""
    rows: bool = False
    """Whether each rank has some rows only of what has no layout (sequence parallelism)."""

    def whole(self, site: str, local: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """`[N, F]` of a site; called on all ranks."""
        if layout is not None:
            return layout.assemble(site, self.gather(local), 1)
        return torch.cat(self.gather(local)) if self.rows else local

    def put_back(
        self, site: str, whole: torch.Tensor, local: torch.Tensor, layout: Layout | None
    ) -> None:
        """Writes this rank's part of `[N, F]` of a site into `local`."""
        if layout is None:
            local.copy_(whole.chunk(self.ranks)[self.rank] if self.rows else whole)
            return
        for at, piece in layout.local(self.rank):
            if piece.op == site:
                local[:, at : at + piece.size] = whole[:, piece.start : piece.stop]


ALONE = Sharing()
"""One rank that holds all."""
