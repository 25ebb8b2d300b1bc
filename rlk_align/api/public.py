"""The public functions. To import them loads nothing; each loads what it needs when it is called.

Their arguments are the command line's flags, with the same meaning and the same defaults. What the
command line takes as names between commas may be a list of names, and prompts may be a list.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

# Loaded before the functions of these names are: an import of a package's module for the first time
# would put the package in the function's place.
import rlk_align.capture
import rlk_align.compare  # noqa: F401

if TYPE_CHECKING:
    from rlk_align.api.loaded import LoadedRun
    from rlk_align.judge.regression import RegressionVerdict
    from rlk_align.judge.verdict import Verdict

AnyPath = str | os.PathLike[str]
Names = str | Sequence[str]
"""Names as the command line takes them, separated by commas, or a list of them."""
Prompts = AnyPath | Sequence[str | Sequence[Any] | Mapping[str, Any]]
"""A file of prompts; or the prompts: texts, lists of messages, lists of token ids."""
Tell = Callable[[str, int, int], None]
"""Receives the progress of long work: (stage, done, total); total 0 if nothing is counted."""


def compare(
    *runs: AnyPath,
    rollout: str | None = None,
    train: str | None = None,
    model: AnyPath | None = None,
    prompts: Prompts | None = None,
    contract: AnyPath | None = None,
    kernels: str | None = None,
    max_new_tokens: int = 32,
    seed: int = 0,
    run_dir: AnyPath | None = None,
    allow_mismatch: Names = (),
    fresh: bool = False,
    layers: str | int | Sequence[int] | None = None,
    sites: Names | None = None,
    edges: Names | None = None,
    production: bool | None = None,
    trace_budget: str = "8GB",
    progress: Tell | None = None,
) -> "Verdict":
    """Loads one model into both engines, scores the same tokens and compares every operator; or
    compares two `runs` that were captured earlier. Everything is kept in `run_dir`.

    Raises what `rlk_align.errors` lists; a verdict that is not a pass is not an error.
    """
    from rlk_align.api import values
    from rlk_align.api.pair import Pair, prepare
    from rlk_align.progress import silent

    pair = values.request(
        Pair,
        rollout=rollout,
        train=train,
        model=model,
        prompts=prompts,
        contract=contract,
        kernels=kernels,
        max_new_tokens=max_new_tokens,
        seed=seed,
        run_dir=run_dir,
        allow_mismatch=allow_mismatch,
        fresh=fresh,
        layers=layers,
        sites=sites,
        edges=edges,
        production=production,
        trace_budget=trace_budget,
    )
    return prepare(pair, [values.text("a run", run) for run in runs], _warn).start(
        progress or silent
    )


def capture(
    engine: str,
    out: AnyPath,
    *,
    tokens: AnyPath | None = None,
    model: AnyPath | None = None,
    kernels: str | None = None,
    prompts: Prompts | None = None,
    max_new_tokens: int = 32,
    seed: int = 0,
    fresh: bool = False,
    layers: str | int | Sequence[int] | None = None,
    sites: Names | None = None,
    trace_budget: str = "8GB",
    progress: Tell | None = None,
) -> Path:
    """Captures one engine into the run `out`: samples and scores, or scores the `tokens` of another
    run. Returns the run's folder, which `compare` and `tokens` take.

    Raises what `rlk_align.errors` lists.
    """
    from rlk_align.api import values
    from rlk_align.api.single import Single, prepare
    from rlk_align.progress import silent

    single = values.request(
        Single,
        engine=engine,
        out=out,
        tokens=tokens,
        model=model,
        kernels=kernels,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        fresh=fresh,
        layers=layers,
        sites=sites,
        trace_budget=trace_budget,
    )
    prepared = prepare(single, _warn)
    prepared.start(progress or silent)
    return prepared.run.folder


@overload
def gate(
    run: AnyPath,
    *,
    contract: AnyPath | None = None,
    recompute: bool = False,
    progress: Tell | None = None,
) -> "Verdict": ...


@overload
def gate(
    run: AnyPath, later: AnyPath, *, contract: AnyPath | None = None
) -> "RegressionVerdict": ...


def gate(
    run: AnyPath,
    later: AnyPath | None = None,
    *,
    contract: AnyPath | None = None,
    recompute: bool = False,
    progress: Tell | None = None,
) -> "Verdict | RegressionVerdict":
    """Judges a compared run, a folder or `@last`, by a contract, by default that of its dtype; or
    says what became worse from one run to a `later` one. Needs neither an engine nor a GPU.

    `recompute` derives the comparison again from the captures, which needs torch. Raises what
    `rlk_align.errors` lists; a verdict that is not a pass is not an error.
    """
    from rlk_align.api import values
    from rlk_align.api.judging import judge_again, judge_later, open_runs
    from rlk_align.progress import silent

    given = values.converted(
        {"run": run, "later": later, "contract": contract, "recompute": recompute}
    )
    first, second = open_runs(given["run"], given["later"], recompute)
    if second is not None:
        return judge_later(first, second, given["contract"])
    return judge_again(first, given["contract"], recompute, progress or silent, _warn)


def load_run(run: AnyPath, contract: AnyPath | None = None) -> "LoadedRun":
    """A compared run, a folder or `@last`: its verdict by a contract, by default that of its dtype,
    and its figures as tables.

    Raises BadOption if there is no such run, CorruptTrace for a damaged one, and ContractError.
    """
    from rlk_align.api import values
    from rlk_align.api.loaded import LoadedRun
    from rlk_align.report.source import load_source

    given = values.converted({"run": run, "contract": contract})
    return LoadedRun(load_source(given["run"], given["contract"]))


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
