"""The story: prompts -> two traces -> pairs -> divergence -> verdict."""

from dataclasses import dataclass

from rlk_align.capture import capture
from rlk_align.comparison import measure
from rlk_align.config import EDGES, CaptureRequest, Report
from rlk_align.contract import default_contract, load_contract
from rlk_align.results import Comparison, Kind
from rlk_align.run import Run, RunRecord
from rlk_align.verdict import Verdict, judge


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


def compare(request: CompareRequest, run: Run, report: Report) -> Verdict:
    """The rollout engine samples, the training engine scores the same ids, and a contract says
    whether they are the same policy. Everything is kept in the run's folder."""
    with run.locked():
        fresh = request.fresh
        rollout = capture(request.rollout, "rollout", run, None, fresh, report)
        tokens = rollout.folder / "tokens.parquet"
        train = capture(request.train, "train", run, tokens, fresh, report)
        comparison = measure(rollout, train, request.judged, request.allowed, report)
        run.save_comparison(comparison)
        run.save(
            RunRecord(
                command=list(request.command),
                captures=run.relative(rollout=rollout.folder, train=train.folder),
            )
        )
        return conclude(run, comparison, request.contract)


def conclude(run: Run, comparison: Comparison, contract: str | None) -> Verdict:
    """Judges a run's comparison and keeps the verdict."""
    name = contract or default_contract(comparison.dtype)
    verdict = judge(comparison, load_contract(name, comparison.dtype))
    run.save_verdict(verdict.to_json())
    return verdict
