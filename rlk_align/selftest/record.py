"""What the self-test found, as frozen records."""

from typing import Literal

from rlk_align.results import EdgeMetrics, Result, SideName

Outcome = Literal["named", "within budget", "precheck", "missed", "misnamed", "wrong side"]


class Detection(Result):
    """One fault on one side of a pair, and what the comparison said of it."""

    fault: str
    op_class: str
    strength: float
    unit: str
    """The unit of the strength; empty where the fault has none."""
    expected: str
    """named, rounding or precheck: see `selftest.faults.fault`."""
    curve: bool
    """Whether it is a point of a curve."""
    rollout: str
    """The engine with its options."""
    train: str
    side: SideName
    """Whose engine has the fault."""
    site: str
    """Where it sits."""
    planted: str | None
    """Where the faulty engine first differs from the same engine without the fault; None where it
    never does, or where that was not looked at."""
    seen: Outcome
    found_site: str | None
    found_side: str | None
    words: str
    """How the comparison says that it is off."""
    others: list[str]
    """Operators over budget where no fault is."""
    metrics: EdgeMetrics | None
    """The metrics of the log-probs; None where the precheck stopped the comparison."""

    @property
    def as_expected(self) -> bool:
        """A point of a curve may be missed, and may not be called something else."""
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
        """Whether the faulty engine itself differs where the catalogue says."""
        return self.planted == self.site


class CleanPair(Result):
    """Two engines without a fault, on one seed's tokens."""

    seed: int
    rollout: str
    """The engine with its options."""
    train: str
    tokens: int
    alarms: list[str]
    """What was found where nothing is wrong: operators over budget, and mismatches."""


class SelfTest(Result):
    """selftest.json."""

    schema_id: Literal["rlk-align/selftest/1"] = "rlk-align/selftest/1"
    engines: dict[str, str]
    """The engine with its options -> its version."""
    rows: int
    """Rows of the tokens that the faults are seen on."""
    detections: list[Detection]
    left_out: tuple[str, ...] = ()
    """Faults that the engines' options rule out, each with its engine and the reason."""
    clean: list[CleanPair]

    @property
    def unexpected(self) -> list[Detection]:
        return [d for d in self.detections if not d.as_expected]

    @property
    def alarms(self) -> list[CleanPair]:
        return [c for c in self.clean if c.alarms]

    @property
    def passed(self) -> bool:
        """Whether all is as it should be; False where nothing was tested."""
        return bool(self.detections) and not self.unexpected and not self.alarms
