"""The input of every report: a finished run with a fresh verdict."""

from dataclasses import dataclass
from pathlib import Path

from rlk_align.judge.verdict import Verdict, judge_by
from rlk_align.probe.record import Probe
from rlk_align.trace.run import Run, RunRecord


@dataclass(frozen=True, kw_only=True)
class ReportSource:
    """A run, its verdict and its probe."""

    run: Run
    record: RunRecord
    verdict: Verdict
    probe: Probe | None
    """The probe; None where the run was not probed."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def name(self) -> str:
        """The folder's own name, which readers know the run by."""
        return self.folder.name or str(self.folder)

    @property
    def place(self) -> Path:
        """The folder as files name it: where it lay when it was judged is not of the run."""
        return Path(self.name)


def load_source(name: str, contract: str | None) -> ReportSource:
    """A compared run by folder or as `@last`, judged by a contract, given by id or file, or by that
    of its dtype.

    Raises BadOption where there is no such run or it compares nothing, CorruptTrace where a file of
    it is missing or is not what was written, ContractError.
    """
    run = Run.open(name)
    comparison = run.comparison
    run.check()
    return ReportSource(
        run=run,
        record=run.record,
        verdict=judge_by(comparison, contract),
        probe=run.load_probe(Probe),
    )
