"""What scoring a dump again says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from rlk_align.interval import Estimate
from rlk_align.logs.diagnose.explain import Breach, Explanation, Status
from rlk_align.logs.diagnose.record import Name
from rlk_align.results import EdgeMetrics, EngineRecord, SideName

SplitName = Literal[
    "decode_vs_prefill", "decode_vs_train", "prefill_vs_train", "prefill_vs_dump", "train_vs_dump"
]


@dataclass(frozen=True, kw_only=True)
class SplitEdge:
    """A part of the dump's mismatch: Δ = log-prob of its second end − that of its first."""

    name: SplitName
    metrics: EdgeMetrics
    mean: Estimate
    """Mean |Δ|, clustered by sequence."""
    share: Estimate
    """The edge's share of the sum of all edges' mean |Δ|."""
    mean_ratio: Estimate
    c: Estimate
    c_limit: float
    """The contract's, for the lower precision of the two ends."""
    diagnosis: Name | None
    """What the edge alone looks like; None where it is equal bit for bit, or nothing is named."""
    nonfinite: int
    """Tokens of which an end is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """A dump's mismatch, split into edges."""

    explained: Explanation
    """The whole dump, by the contract for runs."""
    edges: tuple[SplitEdge, ...]
    """In the order of the chain from the dump's rollout log-probs to its trainer log-probs."""
    own: EdgeMetrics
    """The dump's own mismatch, over the tokens that the edges have."""
    carrier: SplitName | None
    """The edge that is surely larger than each other one."""
    odd: SideName | None
    """The engine that is off by itself: its neighbours in the chain agree, and it with neither."""
    sentence: str
    next: str
    status: Status
    doubts: tuple[str, ...]
    breaches: tuple[tuple[SplitName, Breach], ...]
    chosen: int
    """Sequences that were scored again."""
    worst: int
    """So many of them have the largest mean |Δ| of the dump; 0 where all were taken."""
    usable: int
    missing: int
    """Compared tokens of the chosen sequences that an engine gave no log-prob of."""
    temperature: float
    engines: Mapping[SideName, EngineRecord]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        codes = {"pass": EXIT_PASS, "fail": EXIT_FAIL, "inconclusive": EXIT_INCONCLUSIVE}
        return codes[self.status]
