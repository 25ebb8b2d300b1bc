"""The ranks of one Megatron model: by what they share its weights, and by what its sequences.

As megatron-core numbers them: those of tensor parallelism are neighbours, and those of context
parallelism follow each other in steps of tp.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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

    @classmethod
    def of(cls, ranks: Ranks) -> "Grid":
        """By megatron-core's parallel state, which must stand."""
        from megatron.core import parallel_state as state

        def among(group: object, rank: int, world: int) -> Ranks:
            return Ranks(rank, world, ranks.device, group)

        return cls(
            all=ranks,
            tp=among(
                state.get_tensor_model_parallel_group(),
                state.get_tensor_model_parallel_rank(),
                state.get_tensor_model_parallel_world_size(),
            ),
            cp=among(
                state.get_context_parallel_group(),
                state.get_context_parallel_rank(),
                state.get_context_parallel_world_size(),
            ),
        )

    @property
    def neighbours(self) -> list[int]:
        """The ranks that have the same rows as this one, itself included."""
        first = self.all.rank - self.tp.rank
        return list(range(first, first + self.tp.world))

    @property
    def reports(self) -> bool:
        """Whether this rank says what the log-probs are."""
        return self.tp.rank == 0 and self.cp.rank == 0

    def holders(self, shards: Mapping[str, Held]) -> dict[str, Held]:
        """What every rank holds of each site, by what those of tensor parallelism hold."""
        steps = range(0, self.all.world, self.tp.world)
        return {
            site: [(step + rank, a, b) for step in steps for rank, a, b in held]
            for site, held in shards.items()
        }
