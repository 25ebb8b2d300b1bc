"""Gathers the parts of an operator from the ranks that share it, and writes this rank's part back.
A formula therefore sees whole operators in every layout.

N = rows of the forward, F = features of the whole site; `local` is this rank's part, with its rows
flattened.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlk_align.engines.common.layout import Layout


def _alone(local: torch.Tensor) -> list[torch.Tensor]:
    return [local]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """One of the ranks that share a model."""

    rank: int = 0
    ranks: int = 1
    gather: Callable[[torch.Tensor], list[torch.Tensor]] = _alone
    """Returns the tensors of all ranks, which have one shape, in rank order, on every rank."""
    rows: bool = False
    """Whether a rank has only some rows of a site without a layout (sequence parallelism)."""

    def whole(self, site: str, local: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """Returns a whole site `[N, F]`. All ranks call this."""
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
"""A single rank that has the whole model."""
