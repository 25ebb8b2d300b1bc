"""Prepares a comparison of two sides: from the text of flags to a checked request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_align.api import options
from rlk_align.api.prompts import RunPrompts
from rlk_align.capture.recording import Recording, Side, parse_side
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.judge.checks import check_operators
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.model.checkpoint import default_model, resolve_model
from rlk_align.model.dtypes import lower_precision
from rlk_align.model.edges import passes_for
from rlk_align.progress import Progress
from rlk_align.record.shared.layout import incomplete_steps, is_recording
from rlk_align.results import SideName
from rlk_align.trace.records import load_record
from rlk_align.trace.run import Run
from rlk_align.trace.schema import TraceRecord, check_trace

if TYPE_CHECKING:
    from rlk_align.capture.check import CheckedRequest
    from rlk_align.judge.verdict import Verdict
    from rlk_align.pipeline import CompareRequest


OF_CAPTURES = (
    *("model", "rollout", "train", "prompts", "kernels", "production"),
    *("fresh", "seed", "max_new_tokens", "perturb_lora"),
)
"""Fields that determine the contents of a capture."""


RECORDED = "recorded"
"""The folder, inside a run, of the recordings of a job with the sequences of both sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair(options.CaptureOptions):
    """The flags of a comparison."""

    rollout: str | None = None
    train: str | None = None
    contract: str | None = None
    run_dir: Path | None = None
    allow_mismatch: Sequence[str] | None = None
    edges: str | None = None
    production: bool | None = None
    perturb_lora: bool = False

    def gives(self, *names: str) -> bool:
        """Whether one of these fields, or of `OF_CAPTURES`, differs from its default."""
        defaults = Pair()
        return any(getattr(self, n) != getattr(defaults, n) for n in (*OF_CAPTURES, *names))


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPair:
    """A comparison that is ready to start: every error that can be found early was ruled out."""

    request: "CompareRequest"
    run: Run
    """The run that keeps the comparison."""
    contract: Contract
    """The contract that will judge the comparison."""
    model: str
    """The model of each side whose spec names none."""
    dtype: str
    """The lower-precision dtype of the two sides."""
    most_tokens: int | None
    """The most tokens that may be sampled; None where they are recorded already."""
    sparse: bool
    """Whether the model sends tokens to experts."""
    prompts: RunPrompts | None
    """The prompts that engines read; None where both sides are recordings."""

    @property
    def too_few_tokens(self) -> bool:
        """Whether even responses of full length have too few tokens for a conclusion."""
        return self.most_tokens is not None and self.most_tokens < self.contract.min_tokens

    def check_replay(self, wanted: bool) -> None:
        """Raises BadOption if routing is to be replayed but the model has no experts."""
        if wanted and not self.sparse:
            raise BadOption(
                "--replay-routing: the model has no sparse layers, so there is no routing to replay"
            )

    def start(self, progress: Progress) -> "Verdict":
        """Runs the comparison and returns the verdict."""
        from rlk_align.pipeline import compare

        if self.prompts is not None:
            self.prompts.save()
        return compare(self.request, self.run, progress)


def prepare(
    pair: Pair, runs: Sequence[str], warn: options.Warn, command: Sequence[str] | None = None
) -> PreparedPair:
    """Checks a request, so that errors come before minutes of capturing. Raises RlkError.

    `runs`: none, or two captures made earlier. `command`: the command line; None for a call from
    Python.
    """
    options.check_kernels(pair.kernels)
    options.check_sampling(pair.max_new_tokens, pair.seed)
    judged, plan = options.parse_edges(pair.edges), pair.plan
    allowed = options.parse_kinds(pair.allow_mismatch)
    sides = _sides(pair, runs)
    settings = (pair.model, str(pair.prompts), pair.max_new_tokens, pair.seed)
    changes = ("perturbed",) if pair.perturb_lora else ()
    words = (*settings, *map(str, sides.values()), *changes)
    run = options.choose_run(pair.run_dir, "compare", *words)
    if pair.perturb_lora:
        from rlk_align.api.adapter import perturbed

        sides = {side: perturbed(each, side, run.folder) for side, each in sides.items()}
    if runs:
        sides = _aligned(runs, sides, run, pair.model, warn)
    recorded = _recorded(sides, run)
    _check_recorded_kernels(recorded, pair.kernels)
    captured = pair.recorded_by(next(iter(recorded.values()))) if recorded else pair
    recordings = {side: each for side, each in sides.items() if isinstance(each, Recording)}
    specs = {side: each for side, each in sides.items() if isinstance(each, EngineSpec)}
    prompts = RunPrompts.of(captured.prompts, run) if specs else None
    # A side that no edge needs is scored too: the precheck compares its weights and tokens.
    passes = {side: passes_for(judged, side) or ("prefill",) for side in specs}
    requests = {
        side: captured.request(spec, plan, passes[side], prompts.path)
        for side, spec in specs.items()
        if prompts is not None
    }

    from rlk_align.capture.check import check_request

    checked = {side: check_request(r, side == "rollout") for side, r in requests.items()}
    contract, dtype, sparse = _check_contract(pair.contract, requests, checked, recorded)
    if prompts is not None:
        prompts = prompts.fitting(checked.values(), run, warn)
        requests = {side: replace(r, prompts=prompts.path) for side, r in requests.items()}
    for warning in (w for c in checked.values() for w in c.warnings):
        warn(warning)
    final: dict[SideName, CaptureRequest | Recording] = {**recordings}
    for side, request in requests.items():
        production = side == "rollout" and _measure_production(pair.production, request)
        final[side] = replace(request, production=production)
    stored = (
        pair if prompts is None or pair.prompts is None else replace(pair, prompts=prompts.path)
    )

    from rlk_align.pipeline import CompareRequest

    return PreparedPair(
        request=CompareRequest(
            rollout=final["rollout"],
            train=final["train"],
            judged=judged,
            contract=contract,
            allowed=allowed,
            fresh=pair.fresh,
            command=tuple(command or options.command("compare", runs, stored)),
        ),
        run=run,
        contract=contract,
        model=captured.model or default_model(),
        dtype=dtype,
        most_tokens=_most_tokens(final["rollout"], prompts),
        sparse=sparse,
        prompts=prompts,
    )


def _sides(pair: Pair, runs: Sequence[str]) -> dict[SideName, Side]:
    """Returns the engines or recordings of both sides. Raises UnknownEngine or BadOption."""
    if not runs:
        rollout, train = (options.side(text, pair.kernels) for text in _engines(pair))
        return {"rollout": rollout, "train": train}
    # Options of a capture would have no effect here.
    of_jobs = len(runs) == 2 and all(map(is_recording, runs))
    given = replace(pair, model=None) if of_jobs else pair
    if len(runs) != 2 or given.gives("layers", "sites"):
        raise BadOption(
            "two runs are compared as they are: give RUN_A RUN_B without engines, model, prompts "
            "or other options of a capture"
        )
    return {"rollout": Recording(runs[0]), "train": Recording(runs[1])}


def _aligned(
    runs: Sequence[str],
    sides: dict[SideName, Side],
    run: Run,
    model: str | None,
    warn: options.Warn,
) -> dict[SideName, Side]:
    """Returns the sides themselves; for recordings of a job, runs with the sequences of both, which
    are kept in the run's folder. Raises BadOption for a recording and a run, and for a side
    without a complete step."""
    of_jobs = [name for name in runs if is_recording(name)]
    for name in runs:
        lost = incomplete_steps(Path(name))
        if lost and name not in of_jobs:
            listed = "; ".join(f"step {step}: {reason}" for step, reason in lost.items())
            raise BadOption(f"{name} has no complete step: {listed}", "record it again")
    if not of_jobs:
        return sides
    if len(of_jobs) != len(runs):
        [other] = set(runs) - set(of_jobs)
        what = "is no recording" if Path(other).exists() else "does not exist"
        raise BadOption(
            f"{of_jobs[0]} was recorded in a job, and {other} {what}",
            "compare the rollout side of a job with its training side",
        )
    from rlk_align.record.merge.align import align

    weights = None if model is None else resolve_model(model)
    written, notes = align(runs, run.folder / RECORDED, weights)
    for note in notes:
        warn(note)
    for name in runs:
        for step, reason in incomplete_steps(Path(name)).items():
            warn(f"{name}: step {step} is not complete: {reason}")
    return {side: Recording(str(folder)) for side, folder in written.items()}


def _engines(pair: Pair) -> tuple[str, str]:
    """Returns the specs of the rollout side and the training side."""
    return (pair.rollout or options.default_rollout(), pair.train or options.default_train())


def without_kernels(pair: Pair, folder: Path) -> Pair | None:
    """Returns the same pair without kernels, to compare the drift off and on; None unless
    `--kernels rlk` applies to two engines."""
    if pair.kernels != "rlk":
        return None
    specs = [side for side in map(parse_side, _engines(pair)) if isinstance(side, EngineSpec)]
    if len(specs) != 2:
        return None
    rollout, train = map(options.without_kernels, specs)
    return replace(pair, rollout=rollout, train=train, run_dir=folder, kernels=None)


def _measure_production(wanted: bool | None, request: CaptureRequest) -> bool:
    if wanted is not None or not request.engine.info.compiles:
        return bool(wanted)
    import torch

    return torch.cuda.is_available()


def _recorded(sides: Mapping[SideName, Side], run: Run) -> dict[SideName, Path]:
    """Returns the traces of recordings. Raises BadOption where one is in the run to be written, and
    CorruptTrace where any file of one has changed, even in a pass that is not compared: `gate`
    would refuse that recording."""
    traces: dict[SideName, Path] = {}
    for side, recording in sides.items():
        if isinstance(recording, Recording):
            source = recording.open()
            if source.folder.resolve() == run.folder.resolve():
                raise BadOption(
                    f"{run.folder} is one of the compared runs, and would be overwritten",
                    "name another --run-dir",
                )
            traces[side] = source.capture_folder(side)
            check_trace(traces[side])
    return traces


def _check_recorded_kernels(recorded: Mapping[SideName, Path], wanted: str | None) -> None:
    """Raises BadOption where `--kernels` contradicts the setting that a recording was captured
    with."""
    for folder in recorded.values():
        setting = "rlk" if load_record(TraceRecord, folder / "trace.json").kernels else "off"
        if wanted not in (None, setting):
            raise BadOption(
                f"--kernels {wanted}: {folder} was captured with kernels={setting}",
                "capture it again; or omit --kernels, and set kernels= in the other engine's spec",
            )


def _check_contract(
    name: str | None,
    requests: Mapping[SideName, CaptureRequest],
    checked: "Mapping[SideName, CheckedRequest]",
    recorded: Mapping[SideName, Path],
) -> tuple[Contract, str, bool]:
    """Returns the contract, the lower-precision dtype of the two sides, and whether their model has
    sparse layers. Raises ContractError for a contract that lacks the limit of an operator."""
    from rlk_align.model.sites import model_sites

    records = [load_record(TraceRecord, folder / "trace.json") for folder in recorded.values()]
    dtypes = [requests[side].engine.dtype(c.shape.dtype) for side, c in checked.items()]
    dtype = lower_precision(*dtypes, *(r.dtype for r in records))
    shapes = [*(c.shape for c in checked.values()), *(r.shape for r in records)]
    sites = [site for shape in shapes for site in model_sites(shape)]
    contract = load_contract(name or default_contract(dtype), dtype)
    operators = ((s.name, s.op, s.op_class) for s in sites)
    check_operators(contract, contract.limits_for(dtype), operators)
    return contract, dtype, any(s.op == "experts" for s in sites)


def _most_tokens(rollout: CaptureRequest | Recording, prompts: RunPrompts | None) -> int | None:
    if isinstance(rollout, Recording) or prompts is None:
        return None
    return len(prompts.prompts) * rollout.max_new_tokens
