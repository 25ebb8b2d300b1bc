"""The results of a comparison of weights: what became of each parameter."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS

Status = Literal["equal", "cast", "merged", "quantised", "unmerged", "stale", "missing", "other"]
Outcome = Literal["pass", "fail", "inconclusive"]
STATUSES: tuple[Status, ...] = (
    "equal", "cast", "merged", "quantised", "unmerged", "stale", "missing", "other"
)  # fmt: skip
EXPECTED: tuple[Status, ...] = ("equal", "cast", "merged", "quantised")
"""The statuses after a synchronisation that works."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """A parameter as one side has it."""

    dtype: str
    shape: tuple[int, ...]
    digest: str | None
    """The digest; None if the bits were compared and no digest was needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one parameter between A and B."""

    name: str
    """E.g. `layers.3.k_proj`, or the stored name if there is no canonical one."""
    status: Status
    detail: str = ""
    """An explanation in words."""
    step: str | None = None
    """The earlier checkpoint whose value B has."""
    ranks: list[int] = field(default_factory=list)
    """The ranks of a trainer or an engine whose part differs."""
    a: ParameterState | None = None
    """The parameter of A; None if A lacks it."""
    b: ParameterState | None = None
    differing: int | None = None
    """The number of entries that differ; None if entries were not compared."""
    max_abs_difference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport:
    """The comparison of all parameters of A and B."""

    a: str
    b: str
    kinds: tuple[str, str]
    earlier: list[str]
    """The steps of the earlier checkpoints that were compared, the latest first."""
    adapter: str | None
    findings: list[Finding]

    @property
    def counts(self) -> dict[Status, int]:
        counted = Counter(f.status for f in self.findings)
        return {status: counted[status] for status in STATUSES}

    @property
    def compared(self) -> int:
        """The number of parameters that both sides have."""
        return sum(f.a is not None and f.b is not None for f in self.findings)

    @property
    def exit_code(self) -> int:
        if not self.compared:
            return EXIT_INCONCLUSIVE
        expected = all(f.status in EXPECTED for f in self.findings)
        return EXIT_PASS if expected else EXIT_FAIL

    @property
    def status(self) -> Outcome:
        outcomes: dict[int, Outcome] = {EXIT_PASS: "pass", EXIT_FAIL: "fail"}
        return outcomes.get(self.exit_code, "inconclusive")

    def to_json(self) -> dict[str, Any]:
        """The report in the form of `--output json`."""
        return {
            "schema": "rlk-align/weights/1",
            "status": self.status,
            "exit_code": self.exit_code,
            "a": {"path": self.a, "kind": self.kinds[0]},
            "b": {"path": self.b, "kind": self.kinds[1]},
            "earlier": self.earlier,
            "adapter": self.adapter,
            "compared": self.compared,
            "counts": self.counts,
            "parameters": [asdict(f) for f in self.findings],
        }
