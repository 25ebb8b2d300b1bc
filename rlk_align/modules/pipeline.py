"""`compare --modules`: prompts -> two traces -> weights paired -> modules recomputed -> verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlk_align.capture.capture import capture
from rlk_align.capture.request import CaptureRequest
from rlk_align.compare.controls import check_controls, paired_logprobs
from rlk_align.compare.measure import engine_record
from rlk_align.compare.metrics import edge_metrics
from rlk_align.engines.common.modules import LATER
from rlk_align.errors import PromptError
from rlk_align.judge.budgets import budget_of
from rlk_align.judge.contract import Contract
from rlk_align.model.checkpoint import read_config
from rlk_align.model.families import FAMILIES
from rlk_align.model.prompts import Sample, TokenBatch, load_prompts
from rlk_align.model.sites import RowIndex
from rlk_align.model.tokenise import rendered, tokenise
from rlk_align.modules.definition import DefinedModule, define
from rlk_align.modules.pairing import Pairing, ParameterRows, pair
from rlk_align.modules.record import (
    ChangedWeight,
    ModulesReport,
    ModulesVerdict,
    SideWeights,
    Unjudged,
)
from rlk_align.modules.referee import PASS, NotJudged, Side, referee
from rlk_align.modules.sites import ModuleSite, module_sites
from rlk_align.modules.stored import StoredWeights
from rlk_align.progress import Progress
from rlk_align.report.modules_json import modules_json
from rlk_align.results import RefereedUnit, SideName
from rlk_align.trace.reader import Trace
from rlk_align.trace.records import writing
from rlk_align.trace.run import ModulesRecord, Run
from rlk_align.trace.values import RecordedRows
from rlk_align.trace.writer import one_thread


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesRequest:
    """Two engines, and the checkpoint that both are compared with."""

    model: Path
    rollout: CaptureRequest
    train: CaptureRequest
    contract: Contract
    fresh: bool = False
    command: tuple[str, ...] = ()


def compare_modules(request: ModulesRequest, run: Run, progress: Progress) -> ModulesVerdict:
    """Lets both engines score the tokens of the prompts, and recomputes every module that is known.
    Keeps everything in the run's folder."""
    with run.locked():
        run.invalidate()
        progress("reading transformers' code", 0, 0)
        defined = define(request.model)
        tokens = run.folder / "tokens.parquet"
        with writing(tokens):
            scored_prompts(request.model, request.rollout.prompts).save(tokens)
        rollout = capture(request.rollout, "rollout", run, tokens, request.fresh, progress)
        train = capture(request.train, "train", run, tokens, request.fresh, progress)
        captures = run.relative({"rollout": rollout.folder, "train": train.folder})
        run.save(ModulesRecord(command=list(request.command), captures=captures))
        traces: dict[SideName, Trace] = {"rollout": rollout, "train": train}
        contract = request.contract
        report = examine(request.model, defined, traces, contract, progress)
        verdict = ModulesVerdict(report=report, contract=contract)
        run.save_verdict(modules_json(verdict))
        return verdict


def scored_prompts(model: Path, prompts: Path) -> TokenBatch:
    """The tokens of the prompts; every token after a prompt's first is scored.

    Raises PromptError if there is none.
    """
    ids = tokenise(model, rendered(model, load_prompts(prompts)))
    batch = TokenBatch(
        tuple(Sample(name, (*each[:1],), (*each[1:],)) for name, each in ids.items())
    )
    if not batch.sampled_tokens:
        raise PromptError(
            f"{prompts}: no prompt has two tokens, and --modules scores the prompts themselves",
            "give longer prompts",
        )
    return batch


@one_thread()
def examine(
    model: Path,
    defined: dict[str, DefinedModule],
    traces: dict[SideName, Trace],
    contract: Contract,
    progress: Progress,
) -> ModulesReport:
    """Examines two captures of any model, which this contract will judge."""
    stored, index = StoredWeights(model), RowIndex(traces["rollout"].tokens)
    sides = []
    for name, trace in traces.items():
        progress(f"pairing weights: {name}", 0, 0)
        recorded = RecordedRows(trace.read_pass(PASS), index)
        sides.append(Side(name, trace, pair(stored, live_parameters(trace)), recorded))
    sites = module_sites(defined, stored, [side.pairing for side in sides])
    units: list[RefereedUnit] = []
    unjudged: list[Unjudged] = []
    for done, site in enumerate(sites, 1):
        for side in sides:
            try:
                units.append(_judged(referee(site, side, stored, index), contract))
            except NotJudged as error:
                kind = site.module.kind
                unjudged.append(
                    Unjudged(side=side.name, module=site.name, kind=kind, reason=str(error))
                )
        progress("recomputing in float64", done, len(sites))
    first, second = (side.recorded.reader for side in sides)
    _, a, b = paired_logprobs(first, second, index)
    return ModulesReport(
        model=str(model),
        described=read_config(model).get("model_type") in FAMILIES,
        engines={side.name: engine_record(side.trace) for side in sides},
        tensors=len(stored.tensors),
        weights={side.name: _weights(side.pairing, stored) for side in sides},
        changed=[changed for side in sides for changed in _changed(side)],
        units=units,
        unjudged=unjudged + [u for side in sides for u in _of_no_site(side, sites)],
        drift=edge_metrics(a, b),
        controls=check_controls({s.name: (s.trace, [PASS]) for s in sides}, index, []),
    )


def _judged(unit: RefereedUnit, contract: Contract) -> RefereedUnit:
    """The unit, if the contract has a budget for it. Raises NotJudged."""
    if budget_of(contract, unit) is None:
        raise NotJudged(f"the contract has no budget for it in {unit.dtype}")
    return unit


def live_parameters(trace: Trace) -> dict[str, ParameterRows]:
    """The parameters of a capture's engine."""
    rows = trace.weight_rows()
    return {
        w.name: ParameterRows(w.name, w.dtype, w.shape[-1] if len(w.shape) > 1 else 1, rows[w.name])
        for w in trace.weights.values()
    }


def _weights(pairing: Pairing, stored: StoredWeights) -> SideWeights:
    found = pairing.found
    missing = [name for name in stored.tensors if name not in found]
    return SideWeights(
        found=len(stored.tensors) - len(missing), missing=missing, strays=pairing.strays
    )


def _changed(side: Side) -> list[ChangedWeight]:
    return [
        ChangedWeight(
            side=side.name, tensor=h.tensor, live=h.live, changed=h.changed, rows=len(h.offsets)
        )
        for h in side.pairing.changed
    ]


def _of_no_site(side: Side, sites: list[ModuleSite]) -> Iterator[Unjudged]:
    """The modules of an engine that own parameters and hold the weight of no module of
    transformers' code; and the calls of its modules that were not recorded."""
    held = {h.live.rpartition(".")[0] for h in (s.holding(side.pairing) for s in sites) if h}
    named = {site.path for site in sites}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in side.trace.weights)
    none = {p: "holds no weight of a known module" for p in owners if p not in held | named}
    reasons = side.recorded.reader.record.unexposed
    later = {p: reasons[p + LATER] for p in sorted(held | named) if p + LATER in reasons}
    code = side.trace.record.code
    for path, reason in (*none.items(), *later.items()):
        kind = code[path].kind if path in code else ""
        yield Unjudged(side=side.name, module=path, kind=kind, reason=reason)
