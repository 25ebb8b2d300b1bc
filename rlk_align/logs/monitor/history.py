"""The history of a run for a chart: a bounded number of records, and every finding once."""

from dataclasses import dataclass

from rlk_align.logs.monitor.record import Finding, StepRecord

MAX_RECORDS = 1000
"""The largest number of records in a history."""


@dataclass
class FindingSpan:
    """A finding with the steps that have it."""

    first: int
    last: int
    steps: int
    """The number of steps that have it; steps without it may lie between."""
    latest: Finding
    """The finding of the last of these steps."""


class History:
    """At most MAX_RECORDS records. If there are more, one of every two neighbours is removed: the
    one with fewer findings, or else with the smaller k3. Findings are counted over all steps."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._spans: dict[tuple[str, str], FindingSpan] = {}

    @property
    def spans(self) -> list[FindingSpan]:
        """Each finding, by level and name, in the order of its first step."""
        return list(self._spans.values())

    def add(self, record: StepRecord) -> None:
        """Adds the next step."""
        for finding in record.findings:
            key = (finding.level, finding.name)
            span = self._spans.setdefault(key, FindingSpan(record.step, record.step, 0, finding))
            span.last, span.latest = record.step, finding
            span.steps += 1
        self.records.append(record.model_copy(update={"frameworks": {}, "profile": []}))
        if len(self.records) > MAX_RECORDS:
            pairs = zip(self.records[::2], self.records[1::2], strict=False)
            last = self.records[-1:] if len(self.records) % 2 else []
            self.records = [max(pair, key=_weight) for pair in pairs] + last


def _weight(record: StepRecord) -> tuple[int, float]:
    return len(record.findings), 0.0 if record.k3 is None else record.k3.value
