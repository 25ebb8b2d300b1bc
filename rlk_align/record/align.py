"""Two recordings -> two runs with the same sequences in the same order, which are compared as
captures are."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.errors import BadOption
from rlk_align.model.prompts import Prompt, Sample, TokenBatch, save_prompts
from rlk_align.record.choose import prefix_hash
from rlk_align.record.layout import RECORDING, RecordingRecord, steps_of
from rlk_align.results import SideName
from rlk_align.trace.checksums import CHECKSUMS, add_checksums
from rlk_align.trace.records import load_record, save_record, writing
from rlk_align.trace.renumber import renumber_pass
from rlk_align.trace.run import RunRecord
from rlk_align.trace.run_folder import RUN_JSON
from rlk_align.trace.schema import TRACE_FILES, TraceRecord, check_trace

_RANK = re.compile(r"rank-(\d+)")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The shard of one side at one step."""

    folder: Path
    record: RecordingRecord
    sequences: dict[str, tuple[int, Sample]]
    """Hash of a chosen sequence -> its sample's number here, and the sample."""

    @classmethod
    def open(cls, step: Path) -> "Recorded":
        """Raises CorruptTrace if a file was changed, BadOption if a rank is missing."""
        ranks = sorted(p for p in step.glob("rank-*") if _RANK.fullmatch(p.name))
        records = [load_record(RecordingRecord, path / RECORDING) for path in ranks]
        if len(records) != 1 or records[0].ranks != 1:
            raise BadOption(f"{step} has the shards of {len(records)} ranks: one is read so far")
        check_trace(ranks[0])
        batch = TokenBatch.load(ranks[0] / "tokens.parquet")
        chosen = {
            prefix_hash(batch.samples[i].ids): (i, batch.samples[i]) for i in records[0].chosen
        }
        return cls(ranks[0], records[0], chosen)


def align(names: Sequence[str], folder: Path) -> tuple[dict[SideName, Path], list[str]]:
    """Writes a run for each side below `folder`, and returns them with what a reader should know.

    names: the folders of the rollout side and of the training side, or of one step of each. From
    two sides the last step that both have is taken. Sequences of either side are in both runs: the
    rows that a side lacks are missing there.

    Raises BadOption for sides in another order, without a common step or a common sequence, and
    CorruptTrace for a changed file.
    """
    recorded = [Recorded.open(step) for step in _steps(*map(Path, names))]
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
            f"{rollout.folder.parent} and {train.folder.parent} have no sequence in common",
            "compare the generate call with the step that scored its responses: give the folders "
            "of these steps",
        )
    together = rollout.sequences | {
        key: found for key, found in train.sequences.items() if key not in rollout.sequences
    }
    batch = TokenBatch(tuple(sample for _, sample in together.values()))
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
    model = next((r.folder / "model" for r in (train, rollout) if _has_weights(r.folder)), None)
    written = {
        side: _write_run(folder / side, each, list(together), batch, model)
        for side, each in sides.items()
    }
    return written, list(_missing(sides, set(together)))


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


def _has_weights(shard: Path) -> bool:
    return any((shard / "model").glob("*.safetensors"))


def _missing(sides: dict[SideName, Recorded], together: set[str]) -> list[str]:
    return [
        f"{side} did not record {len(missing)} of {len(together)} sequences: "
        f"{', '.join(sorted(key[:12] for key in missing))}"
        for side, recorded in sides.items()
        if (missing := together - recorded.sequences.keys())
    ]


def _write_run(
    folder: Path, recorded: Recorded, keys: list[str], batch: TokenBatch, model: Path | None
) -> Path:
    """Writes one side as a run with a single capture. model: the folder with the live weights of
    the step, if they were saved."""
    trace = folder / "captures" / "recorded"
    with writing(trace):
        trace.mkdir(parents=True)
    numbers = {
        recorded.sequences[key][0]: i for i, key in enumerate(keys) if key in recorded.sequences
    }
    for name in recorded.record.passes:
        renumber_pass(recorded.folder / name, trace / name, numbers)
    with writing(trace):
        batch.save(trace / "tokens.parquet")
        shutil.copyfile(recorded.folder / "weights.parquet", trace / "weights.parquet")
        save_prompts(
            [Prompt(s.prompt_id, None, s.prompt_ids) for s in batch.samples],
            trace / "prompts.jsonl",
        )
    record = load_record(TraceRecord, recorded.folder / "trace.json")
    update = {
        "prompt_ids": {s.prompt_id: list(s.prompt_ids) for s in batch.samples},
        "recorded": f"step {recorded.record.step} of the job",
    }
    if model is not None:
        update["model"] = str(model.resolve())
    save_record(record.model_copy(update=update), trace / "trace.json")
    passes = [f"{name}/pass.json" for name in recorded.record.passes]
    add_checksums(trace, (*TRACE_FILES, *passes))
    run = RunRecord(command=["rlk-align", "compare"], captures={"capture": "captures/recorded"})
    save_record(run, folder / RUN_JSON)
    add_checksums(folder, [RUN_JSON, f"captures/recorded/{CHECKSUMS}"])
    return folder
