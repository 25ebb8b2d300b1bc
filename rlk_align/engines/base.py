"""The engine protocol: open, describe, weights, run a pass over a batch with taps, close.

An engine of several ranks runs in as many processes, all of which are called alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.kernels import Kernels
from rlk_align.engines.common.parameters import ParameterRecord
from rlk_align.engines.common.tap import Tap
from rlk_align.engines.process.ranks import ALONE, Ranks
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.families import ModelShape
from rlk_align.model.prompts import TokenBatch
from rlk_align.results import CodePlace, GraphReplays

Found = TypeVar("Found")
SamplesDone = Callable[[int], None]
"""Called with the number of samples done."""

Logprobs = dict[int, np.ndarray]
"""Sample -> float32 log-prob of each of its sampled ids, in nats, of the samples that this rank
represents."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled, until EOS or this many tokens."""

    max_new_tokens: int
    seed: int
    forced: bool = False
    """Whether the batch's own responses are what is sampled, whatever the logits say."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a decode pass says of the policy, whether tapped or not."""

    responses: list[list[int]]
    """Per sample, the sampled ids."""
    logprobs: Logprobs


class Engine(ABC):
    """One model in one engine, inside a worker process of its own.

    A pass with `tap` None must leave no trace of observation: no hook, no copy. An `intervention`
    is carried out by the same hooks; it comes with a tap, and in `sample` with forced tokens.
    """

    intervenes = False
    """Whether its passes take an intervention."""
    ranks: Ranks = ALONE
    """This process among the engine's; set before `open`, torch.distributed being up."""
    heartbeats: Path | None = None
    """Where processes that the engine starts itself note their heartbeat."""
    kernels: Kernels | None = None
    """What is put under its operators; set before `open`."""
    graphs: GraphReplays | None = None
    """The CUDA graphs that its last pass in production replayed; None where it counts none."""
    replaced: Mapping[str, str] = MappingProxyType({})
    """Site -> the implementation of ours that computes it, or `own`; empty without `kernels`."""

    def __init__(
        self, spec: EngineSpec, model: Path, shape: ModelShape, production: bool = False
    ) -> None:
        """`production`: run as users do, compiled where the engine compiles; cannot be tapped."""
        self.spec = spec
        self.model_path = model
        self.shape = shape
        self.production = production

    @abstractmethod
    def open(self) -> None:
        """Loads the model and applies the user's patch."""

    @abstractmethod
    def version(self) -> str:
        """The engine's version, with what else decides its numbers."""

    @abstractmethod
    def dtype(self) -> str:
        """What the engine computes in, e.g. `bfloat16`."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """What the live model says of itself, by the names of `rlk_align.compare.parity`."""

    @abstractmethod
    def weights(self) -> Iterator[ParameterRecord]:
        """Every canonical parameter, from the live model, in the checkpoint's layout; what rank
        0 yields counts."""

    def code(self) -> dict[str, CodePlace]:
        """Site -> where it is in the engine's code."""
        return {}

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        """Site -> (rank, first feature, feature after the last) of what each rank holds of it,
        without the sites of which each rank holds every feature."""
        return {}

    def stages(self) -> dict[str, list[int]]:
        """Site -> the ranks of the pipeline's stage that computes it; empty where all ranks do."""
        return {}

    def experts(self) -> list[list[int]]:
        """For each expert the ranks that have it; empty where all ranks have all of them. Called on
        all ranks."""
        return []

    def computes(self, site: str) -> bool:
        """Whether this rank computes a site, or a part of it."""
        return True

    def of_all_ranks(self, found: Mapping[str, Found]) -> dict[str, Found]:
        """What each rank says of the sites that it computes, put together; called on all ranks."""
        return dict(found)

    def unexposed(self, kind: str) -> dict[str, str]:
        """Sites that this engine cannot show in a `decode` or a `prefill`, with the reason."""
        return {}

    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: Tap | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Sampled:
        """Decodes a response after every prompt; the same seed gives the same tokens."""
        raise BadOption(
            f"engine {self.spec.name!r} does not sample",
            "name it as --train, or give `capture` the --tokens of a run",
        )

    def own_samples(self, batch: TokenBatch) -> Sequence[int]:
        """The samples that this rank scores; none where there are more ranks than samples."""
        return range(len(batch.samples))

    @abstractmethod
    def score(
        self,
        batch: TokenBatch,
        tap: Tap | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        """Teacher-forced: one prefill over every whole sequence."""

    def close(self) -> None:
        """Frees what the process's end would not."""
        return
