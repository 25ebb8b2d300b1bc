"""The story: prompts -> two traces -> pairs -> divergence -> operators recomputed -> verdict."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rlk_align.capture.capture import capture
from rlk_align.capture.recording import Recording
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.compare.measure import measure
from rlk_align.errors import BadOption, MissingDependency, ModelError
from rlk_align.judge.contract import Contract
from rlk_align.judge.verdict import Verdict, headline, judge_by
from rlk_align.model.edges import EDGES
from rlk_align.probe.probe import probe_run
from rlk_align.probe.record import Probe
from rlk_align.probe.referee.referee import referee
from rlk_align.probe.replay import replay_routing
from rlk_align.progress import Progress
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import Comparison, EdgeName, Kind
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run, RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """Two sides, and how to compare them."""

    rollout: CaptureRequest | Recording
    train: CaptureRequest | Recording
    tokens: Path | None = None
    """The sequences that both sides score; None lets the rollout engine sample them."""
    judged: tuple[EdgeName, ...] = EDGES
    contract: Contract | None = None
    """None means the contract of the lower-precision dtype."""
    allowed: tuple[Kind, ...] = ()
    fresh: bool = False
    command: tuple[str, ...] = ()


def compare(request: CompareRequest, run: Run, progress: Progress) -> Verdict:
    """Lets the rollout engine sample and the training engine score the same ids, and judges by a
    contract whether they are the same policy. Keeps everything in the run's folder."""
    with run.locked():
        run.invalidate()
        fresh = request.fresh
        rollout = capture(request.rollout, "rollout", run, request.tokens, fresh, progress)
        tokens = rollout.folder / "tokens.parquet"
        train = capture(request.train, "train", run, tokens, fresh, progress)
        record = RunRecord(
            command=list(request.command),
            captures=run.relative({"rollout": rollout.folder, "train": train.folder}),
            judged=request.judged,
            allowed=request.allowed,
        )
        run.save(record)
        comparison, rows = measured(rollout, train, request.judged, request.allowed, progress)
        run.save_comparison(comparison, rows)
        verdict = judge_by(comparison, request.contract)
        run.save_verdict(verdict_json(verdict))
        run.finish()
        return verdict


def recompute(run: Run, progress: Progress) -> Comparison:
    """Compares the captures of a run again; nothing is written."""
    record = run.record
    rollout, train = Trace(run.capture_folder("rollout")), Trace(run.capture_folder("train"))
    comparison, _ = measured(rollout, train, record.judged, record.allowed, progress)
    return comparison


def measured(
    rollout: Trace,
    train: Trace,
    judged: tuple[EdgeName, ...],
    allowed: tuple[Kind, ...],
    progress: Progress,
) -> tuple[Comparison, pa.Table]:
    """Compares both sides with each other, and each side's operators with float64. Returns the
    comparison and its table of rows (see `rlk_align.comparison_table`)."""
    comparison, rows = measure(rollout, train, judged, allowed, progress)
    units = referee(comparison, rollout, train, progress)
    return comparison.model_copy(update={"referee": units}), rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest:
    """How to probe a compared run."""

    edges: tuple[EdgeName, ...] = ()
    """Empty means the edge that the verdict names first; for replays, every judged edge."""
    grafts: bool = True
    """Whether to run each engine on the other's inputs."""
    attribute: bool = False
    replay_routing: bool = False
    """Whether to run each edge's second engine with the first engine's experts."""
    contract: Contract | None = None
    """None means the contract of the lower-precision dtype."""
    plan: TracePlan
    """The values that graft passes keep."""


def probe(request: ProbeRequest, run: Run, progress: Progress) -> tuple[Verdict, Probe]:
    """Runs each engine of a compared run on the other's inputs, to find who introduced the
    differences. Keeps the result in the run's folder, beside the verdict."""
    with run.locked():
        verdict = judge_by(run.comparison, request.contract)
        if verdict.comparison.stopped:
            raise BadOption(
                f"{run.folder}: the precheck stopped the comparison, so there is nothing to probe",
                "correct what differs, or compare anyway with --allow-mismatch",
            )
        first = headline(verdict)
        record = Probe(edges=[])
        if request.replay_routing:
            replays = replay_routing(run, request.edges or run.record.judged, progress)
            record = record.model_copy(update={"replays": replays})
        if request.grafts:
            edges = request.edges or ((first.name,) if first else ())
            record = record.model_copy(update=_grafted(request, run, edges, progress))
        run.save_probe(record)
        run.save_verdict(verdict_json(verdict, record))
        run.finish()
        return verdict, record


def _grafted(
    request: ProbeRequest, run: Run, edges: tuple[EdgeName, ...], progress: Progress
) -> dict[str, object]:
    """Returns the fields of the probe that graft passes fill."""
    try:
        return {"edges": probe_run(run, edges, request.attribute, request.plan, progress)}
    except (MissingDependency, ModelError) as error:
        # The captures alone still show the recomputed operators.
        return {"left_out": error.message}
