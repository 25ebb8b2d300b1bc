"""Two engines, as `compare` and `probe` are given them: from options to a request."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlk_align.capture.request import CaptureRequest
from rlk_align.cli import options
from rlk_align.cli.outputs import Output, check_outputs, parse_outputs
from rlk_align.engines.spec import EngineSpec, replay_path
from rlk_align.errors import BadOption
from rlk_align.judge.checks import check_operators
from rlk_align.judge.contract import Contract
from rlk_align.judge.load import default_contract, load_contract
from rlk_align.model.dtypes import lower_precision
from rlk_align.model.edges import passes_for
from rlk_align.results import SideName
from rlk_align.trace.records import load_record
from rlk_align.trace.run import Run
from rlk_align.trace.schema import TraceRecord

if TYPE_CHECKING:
    from rlk_align.pipeline import CompareRequest


OF_CAPTURES = (
    *("model", "rollout", "train", "prompts", "kernels", "production"),
    *("fresh", "seed", "max_new_tokens"),
)
"""Options that say what a capture holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The options of a comparison, as they were given."""

    model: options.Model = None
    rollout: options.Rollout = None
    train: options.Train = None
    prompts: options.Prompts = None
    contract: options.ContractName = None
    kernels: options.Kernels = None
    max_new_tokens: options.MaxNewTokens = 32
    seed: options.Seed = 0
    run_dir: options.RunDir = None
    output: options.Output = None
    allow_mismatch: options.AllowMismatch = None
    fresh: options.Fresh = False
    layers: options.Layers = None
    sites: options.Sites = None
    edges: options.Edges = None
    production: options.Production = None
    trace_budget: options.TraceBudget = "8GB"

    def gives(self, *names: str) -> bool:
        """Whether one of these options, or of `OF_CAPTURES`, says something."""
        defaults = Pair()
        return any(getattr(self, n) != getattr(defaults, n) for n in (*OF_CAPTURES, *names))


def takes_pair(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer is to see it: each option of a `Pair` by itself, where its parameter
    `given` stands."""
    parameters: list[Parameter] = []
    for own in signature(command).parameters.values():
        if own.name == "given":
            parameters += [p.replace(kind=own.kind) for p in signature(Pair).parameters.values()]
        else:
            parameters.append(own)
    names = [field.name for field in fields(Pair)]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        command(given=Pair(**{name: values.pop(name) for name in names}), **values)

    with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def prepare(
    given: Pair, runs: list[str] | None = None
) -> tuple["CompareRequest", Run, list[Output]]:
    """What to compare, the run that keeps it, and where the verdict is written to. Whatever would
    fail after minutes of capturing fails here. Raises RlkError."""
    options.check_kernels(given.kernels)
    judged = options.parse_edges(given.edges)
    outputs = parse_outputs(given.output)
    plan = options.trace_plan(given.trace_budget, given.layers, given.sites)
    allowed = options.parse_kinds(given.allow_mismatch)
    if runs:
        # What a capture is asked for: given here, it would be left out of account.
        if len(runs) != 2 or given.gives("layers", "sites"):
            raise BadOption(
                "two runs are compared as they are: RUN_A RUN_B, without engines, model, prompts, "
                "and whatever else a capture is asked for"
            )
        pair = [EngineSpec("replay", {"path": run}) for run in runs]
    else:
        texts = (given.rollout or options.default_rollout(), given.train or options.default_train())
        pair = [options.engine_spec(text, given.kernels) for text in texts]
    specs: dict[SideName, EngineSpec] = {"rollout": pair[0], "train": pair[1]}
    settings = (
        given.model,
        str(given.prompts),
        given.max_new_tokens,
        given.seed,
        str(specs["rollout"]),
    )
    run = options.choose_run(given.run_dir, "compare", *settings, str(specs["train"]))
    replays = _check_replays(specs, run)
    _check_replayed_kernels(replays, given.kernels)
    model, prompts = given.model, given.prompts
    if replays:
        # What was captured is what the other side loads, and its tokenizer is asked the same.
        captured = next(iter(replays.values()))
        if model is None:
            model = load_record(TraceRecord, captured / "trace.json").model
        prompts = prompts or captured / "prompts.jsonl"
    check_outputs(outputs, run)

    requests = {
        side: options.capture_request(
            spec,
            model,
            prompts,
            given.max_new_tokens,
            given.seed,
            plan,
            # A side that no edge needs is scored too: its weights and tokens are the precheck's.
            passes_for(judged, side) or ("prefill",),
            side == "rollout" and _measure_production(given.production, spec),
        )
        for side, spec in specs.items()
    }
    contract, dtype = _check_early(requests, replays, given.contract)
    if "rollout" not in replays:
        _check_enough(requests["rollout"], contract, dtype, outputs)

    from rlk_align.pipeline import CompareRequest

    request = CompareRequest(
        rollout=requests["rollout"],
        train=requests["train"],
        judged=judged,
        contract=given.contract,
        allowed=allowed,
        fresh=given.fresh,
        command=tuple(options.command_line()),
    )
    return request, run, outputs


WITHOUT = "kernels-off"
"""The folder, in a run with the kernels, of the run of the same pair without them."""


def prepare_without(given: Pair, run: Run) -> tuple["CompareRequest", Run] | None:
    """The same pair without kernels, for a pair that `--kernels rlk` gave them: drift off and on,
    side by side. None where there is nothing to show so."""
    if given.kernels != "rlk":
        return None
    texts = (given.rollout or options.default_rollout(), given.train or options.default_train())
    if any(EngineSpec.parse(text).name == "replay" for text in texts):
        return None
    rollout, train = map(options.without_kernels, texts)
    folder = run.folder / WITHOUT
    plain = replace(
        given, rollout=rollout, train=train, run_dir=folder, output=None, kernels=None
    )  # fmt: skip
    request, folder_run, _ = prepare(plain)
    return request, folder_run


def _measure_production(wanted: bool | None, spec: EngineSpec) -> bool:
    if spec.name == "replay":
        return False
    if wanted is not None:
        return wanted
    import torch

    return spec.info.compiles and torch.cuda.is_available()


def _check_replays(specs: Mapping[SideName, EngineSpec], run: Run) -> dict[SideName, Path]:
    """The traces that stand for engines. Raises BadOption where one lies in the run to be made."""
    found: dict[SideName, Path] = {}
    for side, spec in specs.items():
        if spec.name == "replay":
            source = Run.open(replay_path(spec))
            if source.folder.resolve() == run.folder.resolve():
                raise BadOption(
                    f"{run.folder} is one of the runs to be compared, and would be written over",
                    "name another --run-dir",
                )
            found[side] = source.capture_folder(side)
    return found


def _check_replayed_kernels(replays: Mapping[SideName, Path], wanted: str | None) -> None:
    """Raises BadOption where `--kernels` says otherwise than a replay was captured."""
    for folder in replays.values():
        held = "rlk" if load_record(TraceRecord, folder / "trace.json").kernels else "off"
        if wanted not in (None, held):
            raise BadOption(
                f"--kernels {wanted}: {folder} was captured with kernels={held}",
                "capture it anew; or leave --kernels out, and say kernels= in the other engine's "
                "spec",
            )


def _check_early(
    requests: Mapping[SideName, CaptureRequest],
    replays: Mapping[SideName, Path],
    contract: str | None,
) -> tuple[Contract, str]:
    """What would fail after minutes of capturing fails now. The contract that will judge, and the
    lower-precision dtype of the two sides."""
    from rlk_align.capture.check import check_request
    from rlk_align.model.sites import Site, model_sites

    dtypes: list[str] = []
    sites: list[Site] = []
    for side, request in requests.items():
        if side in replays:
            record = load_record(TraceRecord, replays[side] / "trace.json")
            dtypes.append(record.dtype)
            sites += model_sites(record.shape)
            continue
        shape, warnings = check_request(request, sampling=side == "rollout")
        options.warn(warnings)
        dtypes.append(request.engine.dtype(shape.dtype))
        sites += model_sites(shape)
    dtype = lower_precision(*dtypes)
    found = load_contract(contract or default_contract(dtype), dtype)
    check_operators(found, found.limits_for(dtype), ((s.name, s.op, s.op_class) for s in sites))
    return found, dtype


def _check_enough(
    rollout: CaptureRequest, contract: Contract, dtype: str, outputs: list[Output]
) -> None:
    """Exits as inconclusive where even responses of full length have too few tokens."""
    from rlk_align.model.prompts import load_prompts

    most = len(load_prompts(rollout.prompts)) * rollout.max_new_tokens
    if most < contract.min_tokens:
        from rlk_align.cli.output import finish_too_few

        finish_too_few(contract, most, rollout.model, dtype, outputs)
