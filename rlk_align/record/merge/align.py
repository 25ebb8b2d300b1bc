"""Two recordings -> two runs with the same sequences in the same order, which are compared as
captures are."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlk_align.errors import BadOption
from rlk_align.model.prompts import Prompt, TokenBatch, save_prompts
from rlk_align.record.merge.history import old_values, read_digests
from rlk_align.record.merge.recorded import Recorded, about, open_step
from rlk_align.record.shared.layout import ADAPTER, reason_of, steps_of
from rlk_align.results import SideName
from rlk_align.trace.checksums import CHECKSUMS, add_checksums
from rlk_align.trace.records import load_record, save_record, writing
from rlk_align.trace.renumber import renumber_passes
from rlk_align.trace.run import RunRecord
from rlk_align.trace.run_folder import RUN_JSON
from rlk_align.trace.schema import TRACE_FILES, TraceRecord


def align(
    names: Sequence[str], folder: Path, model: Path | None = None
) -> tuple[dict[SideName, Path], list[str]]:
    """Writes a run for each side below `folder`, and returns them with what a reader should know.

    names: the folders of the rollout side and of the training side, or of one step of each. From
    two sides the last step that both have is taken. Sequences of either side are in both runs: the
    rows that a side lacks are missing there. model: a checkpoint with the weights that operators
    are recomputed with, where their digests are the recorded ones; by default those that a side
    saved, or the checkpoint that it names.

    Raises BadOption for sides in another order, without a common step or a common sequence, and
    CorruptTrace for a changed file.
    """
    recorded = [open_step(step) for step in _steps(*map(Path, names))]
    sides: dict[SideName, Recorded] = {r.record.side: r for r in recorded}
    if [r.record.side for r in recorded] != ["rollout", "train"]:
        raise BadOption(
            f"{names[0]} is of the {recorded[0].record.side} side, and {names[1]} of the "
            f"{recorded[1].record.side} side",
            "give the rollout's recording first, and then the trainer's",
        )
    rollout, train = recorded
    if not rollout.sequences.keys() & train.sequences.keys():
        raise BadOption(
            f"{rollout.step} and {train.step} have no sequence in common",
            "compare the generate call with the step that scored its responses: give the folders "
            "of these steps",
        )
    together = rollout.sequences | {
        key: sample for key, sample in train.sequences.items() if key not in rollout.sequences
    }
    batch = TokenBatch(tuple(together.values()))
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
    weights = _weights(recorded, model)
    old = _old_weights(rollout, train)
    written = {
        side: _write_run(folder / side, each, list(together), batch, checkpoint, old)
        for (side, each), checkpoint in zip(sides.items(), weights, strict=True)
    }
    return written, [*_missing(sides, set(together)), *_without_weights(recorded, weights)]


def _steps(rollout: Path, train: Path) -> tuple[Path, Path]:
    """The folders of the steps to compare."""
    if not steps_of(rollout) or not steps_of(train):
        of_side = [path for path in (rollout, train) if steps_of(path)]
        if of_side:
            raise BadOption(
                f"{of_side[0]} has several steps, and the other folder is one step",
                "give two sides, or a step of each",
            )
        return rollout, train
    first, second = steps_of(rollout), steps_of(train)
    if not first.keys() & second.keys():
        raise BadOption(
            f"{rollout} and {train} have no step in common: {_listed(first)} and {_listed(second)}",
            "give the folder of a step of each",
        )
    step = max(first.keys() & second.keys())
    return first[step], second[step]


def _listed(steps: dict[int, Path]) -> str:
    return ", ".join(map(str, steps))


def _old_weights(rollout: Recorded, train: Recorded) -> dict[str, str]:
    """Parameter -> which side has an old value of it, by the trainer's earlier steps."""
    steps = steps_of(train.step.parent)
    before = {n: path for n, path in steps.items() if n < train.record.step}
    earlier = [(n, read_digests(about(path))) for n, path in before.items()]
    return old_values(read_digests(rollout.about), read_digests(train.about), earlier)


def _weights(sides: Sequence[Recorded], model: Path | None) -> list[Path | None]:
    """The checkpoint that the operators of each side are recomputed with; None if none is here.
    Raises BadOption for a model without weights."""
    if model is not None and not _holds(model):
        raise BadOption(f"--model {model} has no *.safetensors", "name a checkpoint's folder")
    given = [] if model is None else [model]
    saved = [each.about / "model" for each in reversed(sides)]
    named = [Path(_trace(each).model) for each in sides]
    return [
        next((path for path in (*given, *saved, own, *named) if _holds(path)), None)
        for own in named
    ]


def _holds(path: Path) -> bool:
    """Whether a folder has the weights of a checkpoint."""
    return any(path.glob("*.safetensors"))


def _trace(recorded: Recorded) -> TraceRecord:
    return load_record(TraceRecord, recorded.about / "trace.json")


def _without_weights(sides: Sequence[Recorded], weights: Sequence[Path | None]) -> Iterator[str]:
    for recorded, checkpoint in zip(sides, weights, strict=True):
        if checkpoint is None:
            yield (
                f"operators with weights are not recomputed: {recorded.step} has none "
                f"(weights=False), and {_trace(recorded).model} has none here; give the folder of "
                "the checkpoint by --model"
            )


def _missing(sides: dict[SideName, Recorded], together: set[str]) -> Iterator[str]:
    for side, recorded in sides.items():
        if recorded.lost:
            ranks = ", ".join(map(str, recorded.lost))
            yield (
                f"{side}: {recorded.step} lacks the shards of {len(recorded.lost)} of "
                f"{recorded.record.ranks} ranks, which did not complete them: {ranks} "
                f"({reason_of(recorded.step)})"
            )
        if missing := together - recorded.sequences.keys():
            yield (
                f"{side} did not record {len(missing)} of {len(together)} sequences: "
                f"{', '.join(sorted(key[:12] for key in missing))}"
            )


def _write_run(
    folder: Path,
    recorded: Recorded,
    keys: list[str],
    batch: TokenBatch,
    model: Path | None,
    old: dict[str, str],
) -> Path:
    """Writes one side as a run with a single capture. model: the checkpoint that operators are
    recomputed with; old: as `TraceRecord.old_weights`."""
    trace = folder / "captures" / "recorded"
    with writing(trace):
        trace.mkdir(parents=True)
    for name in recorded.record.passes:
        sources = [(s.folder / name, recorded.numbers(s, keys)) for s in recorded.shards]
        renumber_passes(sources, trace / name)
    with writing(trace):
        batch.save(trace / "tokens.parquet")
        shutil.copyfile(recorded.about / "weights.parquet", trace / "weights.parquet")
        save_prompts(
            [Prompt(s.prompt_id, None, s.prompt_ids) for s in batch.samples],
            trace / "prompts.jsonl",
        )
    record = _trace(recorded)
    update: dict[str, Any] = {
        "prompt_ids": {s.prompt_id: list(s.prompt_ids) for s in batch.samples},
        "recorded": f"step {recorded.record.step} of the job",
        "lost": recorded.lost,
        "old_weights": old,
    }
    if record.adapters:
        path = str((recorded.about / ADAPTER).resolve())
        update["adapters"] = [
            each and each.model_copy(update={"path": path}) for each in record.adapters
        ]
    # Without weights, the recorded config.json says what the operators are.
    model = model or recorded.about / "model"
    if model.exists():
        update["model"] = str(model.resolve())
    save_record(record.model_copy(update=update), trace / "trace.json")
    passes = [f"{name}/pass.json" for name in recorded.record.passes]
    add_checksums(trace, (*TRACE_FILES, *passes))
    run = RunRecord(command=["rlk-align", "compare"], captures={"capture": "captures/recorded"})
    save_record(run, folder / RUN_JSON)
    add_checksums(folder, [RUN_JSON, f"captures/recorded/{CHECKSUMS}"])
    return folder
