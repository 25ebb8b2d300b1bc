"""The story: prompts -> two traces -> pairs -> divergence -> verdict."""

from dataclasses import dataclass

from rlk_align.capture.capture import capture
from rlk_align.capture.request import CaptureRequest
from rlk_align.compare.measure import measure
from rlk_align.judge.contract import default_contract, load_contract
from rlk_align.judge.verdict import Verdict, judge
from rlk_align.model.edges import EDGES
from rlk_align.progress import Progress
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import Comparison, Kind
from rlk_align.trace.run import Run, RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """Two engines, and how they are held against each other."""

    rollout: CaptureRequest
    train: CaptureRequest
    judged: tuple[str, ...] = EDGES
    contract: str | None = None
    """A built-in id or a TOML file; None is the one of the lower-precision dtype."""
    allowed: tuple[Kind, ...] = ()
    fresh: bool = False
    command: tuple[str, ...] = ()


def compare(request: CompareRequest, run: Run, progress: Progress) -> Verdict:
    """The rollout engine samples, the training engine scores the same ids, and a contract says
    whether they are the same policy. Everything is kept in the run's folder."""
    with run.locked():
        run.invalidate()
        fresh = request.fresh
        rollout = capture(request.rollout, "rollout", run, None, fresh, progress)
        tokens = rollout.folder / "tokens.parquet"
        train = capture(request.train, "train", run, tokens, fresh, progress)
        captures = run.relative(rollout=rollout.folder, train=train.folder)
        run.save(RunRecord(command=list(request.command), captures=captures))
        comparison = measure(rollout, train, request.judged, request.allowed, progress)
        run.save_comparison(comparison)
        return conclude(run, comparison, request.contract)


def conclude(run: Run, comparison: Comparison, contract: str | None) -> Verdict:
    """Judges a run's comparison and keeps the verdict."""
    name = contract or default_contract(comparison.dtype)
    verdict = judge(comparison, load_contract(name, comparison.dtype))
    run.save_verdict(verdict_json(verdict))
    return verdict
