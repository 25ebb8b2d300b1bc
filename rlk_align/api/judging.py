"""Compared runs that are to be judged again."""

from rlk_align.api.options import Warn
from rlk_align.errors import BadOption, CorruptTrace
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.judge.regression import RegressionVerdict, judge_regression
from rlk_align.judge.verdict import Verdict, judge_by
from rlk_align.progress import Progress
from rlk_align.results import Comparison
from rlk_align.trace.run import Run


def open_runs(run: str, later: str | None, recompute: bool) -> tuple[Run, Run | None]:
    """The runs to be judged. Raises BadOption where they are two that are to be recomputed, and
    what `Run.open` raises."""
    if later is not None and recompute:
        raise BadOption("--recompute takes one run", "gate each of them with it first")
    return Run.open(run), None if later is None else Run.open(later)


def judge_again(
    run: Run, contract: str | None, recompute: bool, progress: Progress, warn: Warn
) -> Verdict:
    """One run, as it was compared, once every file of it is known to be what was written; or as its
    captures say, compared again. Raises RlkError."""
    if recompute:
        return judge_by(_recomputed(run, progress, warn), contract)
    comparison = run.comparison
    run.check()
    return judge_by(comparison, contract)


def judge_later(first: Run, second: Run, name: str | None) -> RegressionVerdict:
    """Judges what became worse from one run to another. Raises RlkError."""
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
