"""Repeats the passes of a capture with interventions; their trace is beside the capture."""

from collections.abc import Mapping

from rlk_align.capture.capture import open_trace, run_worker
from rlk_align.capture.key import surroundings
from rlk_align.capture.request import TracePlan
from rlk_align.engines.common.intervention import Intervention, RecordedPass
from rlk_align.engines.process.job import Job
from rlk_align.engines.registry import require_installed
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import resolve_model
from rlk_align.progress import Progress
from rlk_align.trace.reader import PassReader, Trace
from rlk_align.trace.records import writing
from rlk_align.trace.run import Role, Run, fingerprint
from rlk_align.trace.schema import passes_in


def intervene(
    capture: Trace,
    role: Role,
    run: Run,
    wanted: Mapping[str, tuple[str, Intervention]],
    plan: TracePlan,
    progress: Progress,
) -> dict[str, PassReader]:
    """The passes of these interventions, by their names; passes that exist already are not
    repeated.

    `wanted`: name -> (`decode` or `prefill`, its intervention); a decode pass is forced to the
    tokens of the capture. Raises the worker's error, and MissingDependency or ModelError if the
    engine or the model of a capture from elsewhere is not here.
    """
    spec = EngineSpec(capture.record.engine, capture.record.options)
    model = resolve_model(capture.record.model)
    if spec.option("python") is None:
        require_installed(spec.name)
    key = fingerprint(
        capture.record.key,
        surroundings(spec),
        [plan.budget, plan.layers, plan.sites],
    )
    folder = (run.folder / "captures" / f"{role}.probe-{key}").resolve()
    named = {name: f"{kind}.{_content(i)}" for name, (kind, i) in wanted.items()}
    interventions = {named[name]: i for name, (_, i) in wanted.items()}
    finished = passes_in(folder)
    missing = tuple(p for p in interventions if p not in finished)
    job = Job(
        engine=spec,
        model=model,
        folder=folder,
        key=key,
        prompts=(capture.folder / "prompts.jsonl").resolve(),
        tokens=(capture.folder / "tokens.parquet").resolve(),
        passes=missing,
        interventions={p: interventions[p] for p in missing},
        max_new_tokens=max(len(s.response_ids) for s in capture.tokens.samples),
        seed=0,
        budget=plan.budget,
        layers=plan.layers,
        sites=plan.sites,
    )
    if missing:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        run_worker(job, progress)
    trace = open_trace(job)
    _check_same_model(capture, trace, role)
    return {name: trace.read_pass(passname) for name, passname in named.items()}


def source_of(recorded: PassReader) -> RecordedPass:
    """The recorded pass of a reader, for an engine to read."""
    return RecordedPass(folder=recorded.folder.parent.resolve(), passname=recorded.folder.name)


def _content(intervention: Intervention) -> str:
    """A name for the effect of an intervention: its sources count by their contents."""
    content = intervention.model_dump(mode="json", exclude={"source", "base"})
    checksums = [
        Trace(s.folder).checksums.files[f"{s.passname}/pass.json"].blake2b
        for s in (intervention.source, intervention.base)
        if s is not None
    ]
    return f"{intervention.kind}-{fingerprint(content, checksums)}"


def _check_same_model(capture: Trace, reloaded: Trace, role: Role) -> None:
    """Raises BadOption if the engine has other weights now than in its capture."""
    before = {n: w.digest for n, w in capture.weights.items()}
    now = {n: w.digest for n, w in reloaded.weights.items()}
    changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    if changed:
        raise BadOption(
            f"the {role} engine's weights are not those of its capture: {changed[0]}",
            "capture it again, with --fresh, from the model that is there now",
        )
