"""The records of a self-test's results."""

from typing import Literal

from rlk_align.results import EdgeMetrics, Result, SideName

Outcome = Literal["named", "within budget", "precheck", "missed", "misnamed", "wrong side"]


class Detection(Result):
    """One fault on one side of a pair, and the result of its comparison."""

    fault: str
    op_class: str
    strength: float
    unit: str
    """The unit of the strength; empty if the fault has no strength."""
    expected: str
    """named, rounding or precheck: see `selftest.faults.fault`."""
    curve: bool
    """Whether the fault is a point of a curve."""
    rollout: str
    """The engine with its options."""
    train: str
    side: SideName
    """The side whose engine has the fault."""
    site: str
    """The operator with the fault."""
    planted: str | None
    """The first operator at which the faulty engine differs from the same engine without the fault;
    None if there is none, or if this was not tested."""
    seen: Outcome
    found_site: str | None
    found_side: str | None
    words: str
    """The error in the words of the comparison."""
    others: list[str]
    """Operators over their budget that have no fault."""
    metrics: EdgeMetrics | None
    """The metrics of the log-probs; None if the precheck stopped the comparison."""

    @property
    def as_expected(self) -> bool:
        """Whether the result is the expected one. A point of a curve may be missed, but not
        misnamed."""
        wanted: dict[str, tuple[Outcome, ...]] = {
            "named": ("named",),
            "rounding": ("named", "within budget"),
            "precheck": ("precheck",),
        }
        allowed = wanted[self.expected]
        if self.curve:
            allowed = (*allowed, "missed")
        return self.seen in allowed and not self.others and (self.curve or self.well_planted)

    @property
    def well_planted(self) -> bool:
        """Whether the faulty engine first differs at the operator that the catalogue names."""
        return self.planted == self.site


class CleanPair(Result):
    """Two engines without a fault, compared on the tokens of one seed."""

    seed: int
    rollout: str
    """The engine with its options."""
    train: str
    tokens: int
    alarms: list[str]
    """False alarms: operators over their budget, and mismatches."""


class SelfTest(Result):
    """selftest.json."""

    schema_id: Literal["rlk-align/selftest/1"] = "rlk-align/selftest/1"
    engines: dict[str, str]
    """The engine with its options -> its version."""
    rows: int
    """Rows of the tokens on which the faults are planted."""
    detections: list[Detection]
    left_out: tuple[str, ...] = ()
    """Faults that the engines' options exclude, each with its engine and the reason."""
    clean: list[CleanPair]

    @property
    def unexpected(self) -> list[Detection]:
        return [d for d in self.detections if not d.as_expected]

    @property
    def alarms(self) -> list[CleanPair]:
        return [c for c in self.clean if c.alarms]

    @property
    def passed(self) -> bool:
        """Whether every result is as expected; False if nothing was tested."""
        return bool(self.detections) and not self.unexpected and not self.alarms
