"""The input of every report: a finished run with a new verdict."""

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
        """The name of the folder, by which readers know the run."""
        return self.folder.name or str(self.folder)

    @property
    def bare_path(self) -> Path:
        """The folder's name as a path: a report does not depend on where the run was judged."""
        return Path(self.name)


def load_source(name: str, contract: str | None) -> ReportSource:
    """Loads a compared run by folder or as `@last`, and judges it by a contract's id or file; None
    means the contract of the run's dtype.

    Raises BadOption where there is no such run or it compares nothing, CorruptTrace where one of
    its files is missing or has changed, and ContractError.
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
