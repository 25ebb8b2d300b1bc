"""A dump that engines are to score again: from words to a request that may start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_align.api import options
from rlk_align.capture.recording import Recording
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.logs.diagnose.contract import RUN_CONTRACT, RunContract, load_run_contract
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.readers.importing import import_dump
from rlk_align.logs.readers.registry import AUTO
from rlk_align.logs.rescore.batch import check_fits, prompts_of, token_batch
from rlk_align.logs.rescore.choose import Choice, choose
from rlk_align.model.prompts import TokenBatch, save_prompts
from rlk_align.progress import Progress
from rlk_align.results import Kind, SideName
from rlk_align.trace.records import writing
from rlk_align.trace.run import Run
from rlk_align.trace.run_folder import RUN_JSON

if TYPE_CHECKING:
    from rlk_align.logs.rescore.record import Rescored
    from rlk_align.trace.reader import Trace

DUMP, CHOSEN = "dump", "chosen"
"""Folders in the run: of a dump that had to be imported, and of the ids to score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescoring(options.CaptureOptions):
    """The flags of a comparison with `--tokens`."""

    tokens: str
    rollout: str | None = None
    train: str | None = None
    contract: str | None = None
    run_dir: Path | None = None
    sequences: int = 64
    allow_mismatch: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRescoring:
    """A rescoring that is ready to start: every error that can be found early was ruled out."""

    requests: Mapping[SideName, CaptureRequest]
    dump: ImportedRun
    choice: Choice
    batch: TokenBatch
    ids: Path
    """The table of the ids to score."""
    run: Run
    """The run that keeps the scores."""
    contract: RunContract
    allowed: tuple[Kind, ...]
    fresh: bool
    command: tuple[str, ...]

    def start(self, progress: Progress) -> "Rescored":
        """Scores the ids on each engine, and splits the dump's mismatch into edges."""
        from rlk_align.compare.measure import engine_record
        from rlk_align.logs.rescore.logprobs import token_logprobs
        from rlk_align.logs.rescore.split import Scores, split
        from rlk_align.model.sites import RowIndex

        traces = self._capture(progress)
        index = RowIndex(self.batch)
        scores = {}
        for side, trace in traces.items():
            values, missing = token_logprobs(trace, index, self.choice.temperature)
            scores[side] = Scores(values, missing, trace.record.dtype)
        explained = explain(self.dump.sequences(), self.contract)
        engines = {side: engine_record(trace) for side, trace in traces.items()}
        return split(self.choice, explained, scores, engines, self.contract)

    def _capture(self, progress: Progress) -> "dict[SideName, Trace]":
        """Captures the engines: two as a compared run, which can be probed, one as a single
        capture."""
        from rlk_align.capture.capture import capture_alone
        from rlk_align.pipeline import CompareRequest, compare
        from rlk_align.trace.reader import Trace

        if len(self.requests) == 1:
            ((side, request),) = self.requests.items()
            trace = capture_alone(request, self.run, self.ids, self.fresh, self.command, progress)
            return {side: trace}
        pair = CompareRequest(
            rollout=self.requests["rollout"],
            train=self.requests["train"],
            tokens=self.ids,
            judged=("prefill_vs_train",),
            allowed=self.allowed,
            fresh=self.fresh,
            command=self.command,
        )
        compare(pair, self.run, progress)
        finished = self.run.reopened()
        return {side: Trace(finished.capture_folder(side)) for side in self.requests}


def prepare(
    rescoring: Rescoring, warn: options.Warn, progress: Progress, command: Sequence[str]
) -> PreparedRescoring:
    """Checks a request, so that errors come before minutes of scoring. Raises RlkError."""
    options.check_kernels(rescoring.kernels)
    options.check_sampling(1, rescoring.seed)
    allowed, plan = options.parse_kinds(rescoring.allow_mismatch), rescoring.plan
    contract = load_run_contract(rescoring.contract or RUN_CONTRACT)
    specs, temperature = _engines(rescoring)
    settings = (rescoring.tokens, rescoring.model, rescoring.sequences, rescoring.seed)
    run = options.choose_run(rescoring.run_dir, "rescore", *settings, *map(str, specs.values()))
    folder = run.folder / CHOSEN
    requests: dict[SideName, CaptureRequest] = {
        side: rescoring.request(spec, plan, ("prefill",), folder / "prompts.jsonl")
        for side, spec in specs.items()
    }

    from rlk_align.capture.check import check_request

    checked = {side: check_request(r, sampling=False) for side, r in requests.items()}
    for warning in (w for c in checked.values() for w in c.warnings):
        warn(warning)
    dump = open_dump(rescoring.tokens, run, command, progress)
    choice = choose(dump, rescoring.sequences, rescoring.seed, temperature)
    batch = token_batch(choice.sequences)
    for side, each in checked.items():
        check_fits(batch, each.shape, each.context, side)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_prompts(prompts_of(batch), folder / "prompts.jsonl")
        batch.save(folder / "tokens.parquet")
    return PreparedRescoring(
        requests=requests,
        dump=dump,
        choice=choice,
        batch=batch,
        ids=folder / "tokens.parquet",
        run=run,
        contract=contract,
        allowed=allowed,
        fresh=rescoring.fresh,
        command=tuple(command),
    )


def _engines(rescoring: Rescoring) -> tuple[dict[SideName, EngineSpec], float | None]:
    """Returns the engines, and the temperature that their specs state. The temperature is removed
    from the specs: every engine scores at temperature 1, and its logits are divided."""
    texts: dict[SideName, str | None] = {"rollout": rescoring.rollout, "train": rescoring.train}
    specs: dict[SideName, EngineSpec] = {}
    stated: set[float] = set()
    for side, text in texts.items():
        if text is None:
            continue
        spec = options.side(text, rescoring.kernels)
        if isinstance(spec, Recording):
            raise BadOption(
                f"--{side} {text}: a recording has its own ids, but --tokens gives others",
                "name an engine",
            )
        chosen = dict(spec.options)
        if "temperature" in chosen:
            stated.add(float(chosen.pop("temperature")))
        specs[side] = EngineSpec(spec.name, chosen)
    if not specs:
        raise BadOption(
            "--tokens needs an engine that scores them", "add --train SPEC or --rollout SPEC"
        )
    if len(stated) > 1:
        raise BadOption("the two sides state different temperatures", "state one")
    return specs, next(iter(stated), None)


def open_dump(name: str, run: Run, command: Sequence[str], progress: Progress) -> ImportedRun:
    """Opens the imported run of that name; a path that is not a run is imported into the run first.
    Raises BadOption where it is the run to be written, and DumpError where it cannot be read."""
    path = Path(name)
    if name == "@last" or (path / RUN_JSON).is_file():
        dump = ImportedRun.open(name)
        if dump.folder.resolve() == run.folder.resolve():
            raise BadOption(
                f"--tokens and --run-dir name one run, {run.folder}", "name another --run-dir"
            )
        return dump
    folder = run.folder / DUMP
    import_dump(AUTO, [path], folder, list(command), progress)
    return ImportedRun.open(str(folder))
