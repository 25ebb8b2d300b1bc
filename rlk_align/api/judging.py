"""Judges compared runs again."""

from rlk_align.api.options import Warn
from rlk_align.errors import BadOption, CorruptTrace
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.judge.regression import RegressionVerdict, judge_regression
from rlk_align.judge.verdict import Verdict, judge_by
from rlk_align.progress import Progress
from rlk_align.results import Comparison
from rlk_align.trace.run import Run


def open_runs(run: str, later: str | None, recompute: bool) -> tuple[Run, Run | None]:
    """Opens one run or two. Raises BadOption where two runs are to be recomputed, and the errors of
    `Run.open`."""
    if later is not None and recompute:
        raise BadOption("--recompute takes one run", "gate each of them with it first")
    return Run.open(run), None if later is None else Run.open(later)


def judge_again(
    run: Run, contract: str | None, recompute: bool, progress: Progress, warn: Warn
) -> Verdict:
    """Judges the comparison of one run after checking every file; with `recompute`, compares its
    captures again. Raises RlkError."""
    if recompute:
        return judge_by(_recomputed(run, progress, warn), contract)
    comparison = run.comparison
    run.check()
    return judge_by(comparison, contract)


def judge_later(first: Run, second: Run, name: str | None) -> RegressionVerdict:
    """Judges what became worse between two runs. Raises RlkError."""
    for run in (first, second):
        run.check()
    before, after = first.comparison, second.comparison
    contract = load_contract(name or default_contract(after.dtype), after.dtype)
    return judge_regression(before, after, contract)


def _recomputed(run: Run, progress: Progress, warn: Warn) -> Comparison:
    from rlk_align.pipeline import recompute

    comparison = recompute(run, progress)
    try:
        if run.comparison.model_dump_json() != comparison.model_dump_json():
            warn("comparison.json disagrees with its captures; the captures are judged")
    except CorruptTrace as error:
        warn(f"{error.message}; the captures are judged")
    return comparison
