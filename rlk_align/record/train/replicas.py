"""A live causal LM of transformers that several ranks train, each with sequences of its own."""

from collections.abc import Sequence

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.process.ranks import Ranks
from rlk_align.record.shared.choose import Key
from rlk_align.record.shared.together import of_all
from rlk_align.record.train.hf import LiveHF
from rlk_align.record.train.live import ForwardInput
from rlk_align.record.train.segments import Chosen
from rlk_align.trace.writer import PassWriter


class LiveReplicas(LiveHF):
    """The ranks run their forwards together, because they gather parameters from each other, and
    repeat one where any of them records a sequence."""

    def among(self, ranks: Ranks) -> None:
        """Declares the ranks."""
        self.ranks = ranks
        self.replica = self.place = ranks.rank

    def keys_of_all(self, keys: list[Key]) -> list[list[Key]]:
        return of_all(self.ranks, keys)

    def taps(self, tap: PassWriter, chosen: Sequence[Chosen], input: ForwardInput) -> Hooks:
        for each in chosen:
            tap.computes(self.ranks.rank, each.number, range(len(each.segment.ids)))
        return super().taps(tap, chosen, input)
