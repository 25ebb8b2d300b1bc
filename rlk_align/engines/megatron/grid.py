"""The ranks of one Megatron model: those that share its weights, its sequences, its samples, its
experts, and its layers.

As megatron-core numbers them: those of tensor parallelism are neighbours, those of context
parallelism follow each other in steps of tp, those that have other samples in steps of tp * cp, and
stages of a pipeline come last. Experts are shared by neighbours.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rlk_align.engines.process.ranks import Ranks

Held = list[tuple[int, int, int]]
"""(rank, first feature, feature after the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where one process is among them."""

    all: Ranks
    tp: Ranks
    """Among those that share weights, and have the same rows."""
    cp: Ranks
    """Among those that share sequences, and have the same shards of weights."""
    dp: Ranks
    """Among those that have other samples."""
    ep: Ranks
    """Among those that share experts."""
    pp: Ranks
    """Among the stages of the pipeline that its rows go through."""

    @classmethod
    def of(cls, ranks: Ranks) -> "Grid":
        """The grid of megatron-core's parallel state, which must exist."""
        from megatron.core import parallel_state as state

        def among(kind: str) -> Ranks:
            group, rank, world = (
                getattr(state, f"get_{kind}_parallel_{what}")()
                for what in ("group", "rank", "world_size")
            )
            return Ranks(rank, world, ranks.device, group)

        return cls(
            all=ranks,
            tp=among("tensor_model"),
            cp=among("context"),
            dp=among("data"),
            ep=among("expert_model"),
            pp=among("pipeline_model"),
        )

    @property
    def neighbours(self) -> list[int]:
        """The ranks that have the same rows as this one, itself included."""
        first = self.all.rank - self.tp.rank
        return list(range(first, first + self.tp.world))

    @property
    def reports(self) -> bool:
        """Whether this rank says what the log-probs of its samples are."""
        return self.tp.rank == 0 and self.cp.rank == 0 and self.pp.rank == self.pp.world - 1

    def stage(self, number: int) -> list[int]:
        """The ranks of one stage."""
        size = self.all.world // self.pp.world
        return list(range(number * size, (number + 1) * size))

    def holders(self, held: Held, stage: int) -> Held:
        """What every rank of a stage holds of a site, by what those of tensor parallelism hold."""
        firsts = self.stage(stage)[:: self.tp.world]
        return [(first + rank, a, b) for first in firsts for rank, a, b in held]

    def of_all_stages(self, of_stage: Any) -> list[Any]:
        """Objects of all stages, in their order; called on every rank."""
        every: list[Any] = [None] * self.pp.world
        if self.pp.world == 1:
            return [of_stage]
        dist.all_gather_object(every, of_stage, group=self.pp.group)
        return every
