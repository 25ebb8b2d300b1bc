"""What became of each parameter, as values."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlk_align.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS

Status = Literal["equal", "cast", "merged", "stale", "missing", "other"]
Outcome = Literal["pass", "fail", "inconclusive"]
STATUSES: tuple[Status, ...] = ("equal", "cast", "merged", "stale", "missing", "other")
EXPECTED: tuple[Status, ...] = ("equal", "cast", "merged")
"""What a working synchronisation leaves."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as one side holds it."""

    dtype: str
    shape: tuple[int, ...]
    digest: str | None
    """The digest; None where the other side's bits were equal and nothing had to be digested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one parameter between A and B."""

    name: str
    """E.g. `layers.3.k_proj`, or its stored name where that has no canonical one."""
    status: Status
    detail: str = ""
    """What is known of it, in words."""
    step: str | None = None
    """The earlier checkpoint that B has it from."""
    ranks: list[int] = field(default_factory=list)
    """The processes of a trainer or an engine that hold what differs."""
    a: Held | None = None
    """What A holds; None where A lacks the parameter."""
    b: Held | None = None
    differing: int | None = None
    """Entries that differ; None where they were not compared."""
    max_abs_difference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport:
    """What became of the weights between A and B."""

    a: str
    b: str
    kinds: tuple[str, str]
    earlier: list[str]
    """The steps of the earlier checkpoints that were looked at, the latest first."""
    adapter: str | None
    findings: list[Finding]

    @property
    def counts(self) -> dict[Status, int]:
        counted = Counter(f.status for f in self.findings)
        return {status: counted[status] for status in STATUSES}

    @property
    def compared(self) -> int:
        """How many parameters both sides have."""
        return sum(f.a is not None and f.b is not None for f in self.findings)

    @property
    def exit_code(self) -> int:
        if not self.compared:
            return EXIT_INCONCLUSIVE
        expected = all(f.status in EXPECTED for f in self.findings)
        return EXIT_PASS if expected else EXIT_FAIL

    @property
    def status(self) -> Outcome:
        found: dict[int, Outcome] = {EXIT_PASS: "pass", EXIT_FAIL: "fail"}
        return found.get(self.exit_code, "inconclusive")

    def to_json(self) -> dict[str, Any]:
        """The report as `--output json` writes it."""
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
