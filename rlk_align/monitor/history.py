"""The records of a run, as many as a chart has room for."""

from rlk_align.monitor.record import StepRecord

MOST = 1000


class History:
    """At most MOST records. Beyond that, of two neighbours the one that says more is kept: the one
    with findings, or else with the larger k3."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Adds the next step."""
        self.records.append(record.model_copy(update={"frameworks": {}, "profile": []}))
        if len(self.records) > MOST:
            pairs = zip(self.records[::2], self.records[1::2], strict=False)
            last = self.records[-1:] if len(self.records) % 2 else []
            self.records = [max(pair, key=_weight) for pair in pairs] + last


def _weight(record: StepRecord) -> tuple[int, float]:
    return len(record.findings), 0.0 if record.k3 is None else record.k3.value
