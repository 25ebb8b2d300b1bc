"""The engine protocol: open, describe, weights, run a pass over a batch with taps, close.

An engine of several ranks runs in one process for each rank; each method is called on all ranks.
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
from rlk_align.engines.process.ranks import ALONE, Ranks
from rlk_align.engines.registry import does_not_sample
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.results import CodePlace, GraphReplays
from rlk_align.trace.schema import CacheRecord, LoraRecord, QuantisedProduct, request_seed
from rlk_align.trace.writer import PassWriter

SiteValue = TypeVar("SiteValue")
SamplesDone = Callable[[int], None]
"""Called with the number of samples done."""

Logprobs = dict[int, np.ndarray]
"""Sample -> float32 log-probs of its sampled ids, in nats, for the samples of this rank."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled, until EOS or this many tokens."""

    max_new_tokens: int
    seed: int
    forced: bool = False
    """Whether the batch's own responses are sampled, whatever the logits are."""

    def request_seed(self, number: int) -> int:
        """The seed of the request of a sample."""
        return request_seed(self.seed, number)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a decode pass."""

    responses: list[list[int]]
    """Per sample, the sampled ids."""
    logprobs: Logprobs


class Engine(ABC):
    """One model in one engine, inside a worker process of its own.

    A pass with `tap` None must run without any hook or copy. The hooks of the tap also carry out an
    `intervention`, which comes with a tap, and in `sample` with forced tokens.
    """

    intervenes = False
    """Whether its passes take an intervention."""
    ranks: Ranks = ALONE
    """The rank of this process; set before `open`, when torch.distributed is initialised."""
    heartbeats: Path | None = None
    """The folder in which processes that the engine starts itself write their heartbeats."""
    kernels: Kernels | None = None
    """The kernels that replace its operators; set before `open`."""
    graphs: GraphReplays | None = None
    """The CUDA graphs that its last production pass replayed; None if it counts none."""
    replaced: Mapping[str, str] = MappingProxyType({})
    """Site -> the implementation of `kernels` that computes it, or `own`; empty without them."""

    def __init__(
        self, spec: EngineSpec, model: Path, shape: ModelShape, production: bool = False
    ) -> None:
        """`production`: run as users run it, compiled if the engine compiles, and never tapped."""
        self.spec = spec
        self.model_path = model
        self.shape = shape
        self.production = production

    @abstractmethod
    def open(self) -> None:
        """Loads the model and applies the user's `patch=`."""

    @abstractmethod
    def version(self) -> str:
        """The engine's version, with the versions of other packages that affect its numbers."""

    @abstractmethod
    def dtype(self) -> str:
        """The dtype that the engine computes in, e.g. `bfloat16`."""

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """The live model's settings, by the names of `rlk_align.compare.parity`."""

    @abstractmethod
    def weights(self) -> Iterator[ParameterRecord]:
        """Every canonical parameter of the live model, in the checkpoint's layout; only the records
        that rank 0 yields are used."""

    def adapters(self) -> list[LoraRecord | None]:
        """The live LoRA adapters, of which sample i has that of the place i modulo their number;
        None for none, and empty without any. All ranks call this."""
        return []

    def products(self) -> dict[str, QuantisedProduct]:
        """Parameter -> how the live model multiplies by it, for those that it holds in fp8."""
        return {}

    def cache(self) -> CacheRecord | None:
        """The live attention's keys and values, if they are quantised."""
        return None

    def code(self) -> dict[str, CodePlace]:
        """Site -> where the engine's code computes it."""
        return {}

    def shards(self) -> dict[str, list[tuple[int, int, int]]]:
        """Site -> (rank, first feature, feature after the last) of each rank's shard. Sites of
        which each rank has every feature are left out."""
        return {}

    def stages(self) -> dict[str, list[int]]:
        """Site -> the ranks of the pipeline stage that computes it; empty for a single stage."""
        return {}

    def experts(self) -> list[list[int]]:
        """The ranks that have each expert; empty if all ranks have all experts."""
        return []

    def computes(self, site: str) -> bool:
        """Whether this rank computes a site or a part of it."""
        return True

    def merge_sites(self, values: Mapping[str, SiteValue]) -> dict[str, SiteValue]:
        """Site -> value for the sites of all ranks, from those that each rank computes."""
        return dict(values)

    def unexposed(self, kind: str) -> dict[str, str]:
        """Sites that this engine cannot expose in a `decode` or a `prefill` -> the reason."""
        return {}

    def sample(
        self,
        batch: TokenBatch,
        sampling: Sampling,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Sampled:
        """Decodes a response after every prompt; the same seed gives the same tokens."""
        raise does_not_sample(self.spec.name)

    def own_samples(self, batch: TokenBatch) -> Sequence[int]:
        """The samples that this rank scores; a rank beyond the number of samples has none."""
        return range(len(batch.samples))

    @abstractmethod
    def score(
        self,
        batch: TokenBatch,
        tap: PassWriter | None,
        done: SamplesDone,
        intervention: Intervention | None = None,
    ) -> Logprobs:
        """Scores the responses, teacher-forced: one prefill over every whole sequence."""

    def close(self) -> None:
        """Releases what outlives the process, and undoes process-wide changes."""
        return
