"""The result of scoring a dump again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.explain import EXIT_CODES, Breach, Explanation, Status
from rlk_align.logs.diagnose.record import Name
from rlk_align.results import EdgeMetrics, EngineRecord, SideName

SplitName = Literal[
    "decode_vs_prefill", "decode_vs_train", "prefill_vs_train", "prefill_vs_dump", "train_vs_dump"
]


@dataclass(frozen=True, kw_only=True)
class SplitEdge:
    """An edge with a part of the dump's mismatch: Δ is the second end's log-prob minus the first
    end's."""

    name: SplitName
    metrics: EdgeMetrics
    mean: Estimate
    """Mean |Δ|, clustered by sequence."""
    share: Estimate
    """The share of the edge in the sum of all edges' mean |Δ|."""
    mean_ratio: Estimate
    c: Estimate
    c_limit: float
    """The contract's limit of c for the lower precision of the two ends."""
    diagnosis: Name | None
    """The diagnosis of the edge alone; None if it is equal bit for bit, or has no diagnosis."""
    nonfinite: int
    """Tokens with a NaN or an infinite value at an end."""


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """A dump's mismatch, split into edges."""

    explained: Explanation
    """The verdict on the whole dump by the contract for runs."""
    edges: tuple[SplitEdge, ...]
    """In the order of the chain from the dump's rollout log-probs to its trainer log-probs."""
    own: EdgeMetrics
    """The dump's own mismatch, over the tokens of the edges."""
    carrier: SplitName | None
    """The edge that is certainly larger than each of the others."""
    odd: SideName | None
    """The engine that differs from both neighbours in the chain, although these agree."""
    sentence: str
    next: str
    status: Status
    doubts: tuple[str, ...]
    breaches: tuple[tuple[SplitName, Breach], ...]
    chosen: int
    """The number of sequences that were scored again."""
    worst: int
    """The number of them with the largest mean |Δ| of the dump; 0 if all were taken."""
    usable: int
    missing: int
    """Compared tokens of the chosen sequences for which an engine gave no log-prob."""
    temperature: float
    engines: Mapping[SideName, EngineRecord]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The exit code of the process."""
        return EXIT_CODES[self.status]
