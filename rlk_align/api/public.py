"""The public functions. Their import is cheap: each loads what it needs when it is called.

Their arguments are the flags of the command line, with the same meanings and defaults. Names that
the command line separates by commas may be a list, and so may prompts.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

# Imported first: a later import of a module of these packages would replace the functions of the
# same names.
import rlk_align.capture
import rlk_align.compare  # noqa: F401

if TYPE_CHECKING:
    from rlk_align.api.loaded import LoadedRun
    from rlk_align.judge.regression import RegressionVerdict
    from rlk_align.judge.verdict import Verdict

AnyPath = str | os.PathLike[str]
Names = str | Sequence[str]
"""Names separated by commas, as on the command line, or a list of names."""
Prompts = AnyPath | Sequence[str | Sequence[Any] | Mapping[str, Any]]
"""A file of prompts; or a list of prompts: texts, lists of messages, or lists of token ids."""
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
    perturb_lora: bool = False,
    trace_budget: str = "8GB",
    progress: Tell | None = None,
) -> "Verdict":
    """Loads one model into both engines, scores the same tokens and compares every operator; or
    compares two `runs` that were captured earlier. Everything is kept in `run_dir`.

    Raises the errors of `rlk_align.errors`; a verdict that is not a pass is not an error.
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
        perturb_lora=perturb_lora,
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

    Raises the errors of `rlk_align.errors`.
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
    judges what became worse between the run and a `later` one. Needs neither an engine nor a GPU.

    `recompute` derives the comparison again from the captures, which needs torch. Raises the
    errors of `rlk_align.errors`; a verdict that is not a pass is not an error.
    """
    from rlk_align.api import values
    from rlk_align.api.judging import judge_again, judge_later, open_runs
    from rlk_align.progress import silent

    flags = values.converted(
        {"run": run, "later": later, "contract": contract, "recompute": recompute}
    )
    first, second = open_runs(flags["run"], flags["later"], recompute)
    if second is not None:
        return judge_later(first, second, flags["contract"])
    return judge_again(first, flags["contract"], recompute, progress or silent, _warn)


def load_run(run: AnyPath, contract: AnyPath | None = None) -> "LoadedRun":
    """Loads a compared run, a folder or `@last`: its verdict by a contract, by default that of its
    dtype, and its figures as tables.

    Raises BadOption if there is no such run, CorruptTrace for a damaged one, and ContractError.
    """
    from rlk_align.api import values
    from rlk_align.api.loaded import LoadedRun
    from rlk_align.report.source import load_source

    flags = values.converted({"run": run, "contract": contract})
    return LoadedRun(load_source(flags["run"], flags["contract"]))


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
