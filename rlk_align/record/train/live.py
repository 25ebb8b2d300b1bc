"""A trainer's live model, as the recorder sees it; a subclass for each library.

B = rows of the input, S = columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Engine
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.process.ranks import ALONE, Ranks
from rlk_align.record.shared.choose import Key
from rlk_align.record.train.segments import Chosen, Segment
from rlk_align.trace.writer import PassWriter


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """The sequences that a forward reads."""

    segments: list[Segment]
    shape: tuple[int, int]
    """(B, S)."""
    device: torch.device


class Live(ABC):
    """A live model. `open` comes before the other methods, once for each recorded step."""

    model: Any
    """The module whose forwards are recorded."""
    ranks: Ranks = ALONE
    """The ranks that record together; each has a shard."""
    replica: int = 0
    """As `RecordingRecord.replica`."""

    @property
    def parts(self) -> "Sequence[Live]":
        """This model and, where a rank has several models that are parts of one, the others: each
        has forwards of its own."""
        return (self,)

    alone: bool = True
    """Whether no other rank may see sequences that this rank does not know of."""

    @abstractmethod
    def open(self, folder: Path, about: Path) -> Engine:
        """The adapter of the engine around the live model. `folder`: the shard of this rank, which
        gets the model's config.json; `about`: the folder that describes the step, which gets the
        weights if they are saved, when those of the adapter are read."""

    @abstractmethod
    def input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInput:
        """The input of a forward with these arguments. Raises BadOption if it is not recorded."""

    @abstractmethod
    def taps(self, tap: PassWriter, chosen: Sequence[Chosen], input: ForwardInput) -> Hooks:
        """Installed taps on the rows of the chosen sequences in the next forward."""

    @abstractmethod
    def logprobs(
        self, output: Any, chosen: Chosen, input: ForwardInput
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The positions `[N]` of a chosen sequence whose log-probs the latest forward gives, and
        these, float32 `[N]`; None on a rank that does not report them."""

    def passed_on(
        self, output: Any, chosen: Sequence[Chosen], input: ForwardInput
    ) -> tuple[str, torch.Tensor, ForwardRows] | None:
        """What a stage of a pipeline sends to the next: the site, its rows of the chosen sequences
        `[N, F]`, and which these are; None on a rank that sends nothing or does not report it."""
        return None

    def keys_of_all(self, keys: list[Key]) -> list[list[Key]]:
        """The keys of new sequences in this forward, on each of the ranks that have to repeat a
        forward together; those of this rank at `place`."""
        return [keys]

    def counts(self) -> bool:
        """Whether the next forward is one of the policy, and not of what the same modules can also
        compute, as PEFT's layers without their adapter."""
        return True

    place: int = 0
    """The place of this rank in `keys_of_all`."""

    taps_together: bool = False
    """Whether those ranks have to tap a forward together, also one with no chosen sequence of its
    own."""

    def unexposed(self, taps: Hooks) -> dict[str, str]:
        """Sites that a forward with these taps did not expose -> the reason."""
        return {}

    def see_forwards(self) -> Hooks:
        """What has to be installed while a step is recorded."""
        return Hooks()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leaves the generators of random numbers as they were before."""
        with torch.random.fork_rng():
            yield
