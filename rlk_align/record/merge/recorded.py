"""One step of one side as it was recorded: the shards of its ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.errors import BadOption
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.record.shared.choose import Key, prefix_hash
from rlk_align.record.shared.layout import RECORDING, SHARED, SHARED_FILES, RecordingRecord
from rlk_align.trace.checksums import check_files, read_checksums
from rlk_align.trace.records import load_record
from rlk_align.trace.schema import PassRecord, check_trace

_RANK = re.compile(r"rank-(\d+)")


@dataclass(frozen=True, slots=True)
class RecordedShard:
    """The shard of one rank."""

    folder: Path
    record: RecordingRecord
    samples: dict[str, tuple[int, Sample]]
    """Hash of a chosen sequence -> its sample's number here, and the sample."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One step of one side."""

    step: Path
    about: Path
    """The folder with its trace.json and weights.parquet, and with model/."""
    shards: list[RecordedShard]
    sequences: dict[str, Sample]
    """Hash of a chosen sequence -> its sample, in the order of the shards."""

    @property
    def record(self) -> RecordingRecord:
        """The record of the first shard; all say the same of the step."""
        return self.shards[0].record

    @property
    def lost(self) -> list[int]:
        """The ranks that did not complete their shards."""
        return sorted(set(range(self.record.ranks)) - {s.record.rank for s in self.shards})

    def numbers(self, shard: RecordedShard, keys: Sequence[str]) -> dict[int, int]:
        """Sample of a shard -> its place in `keys`, for the sequences that are read from there: of
        several replicas with a sequence, from the first."""
        return {
            shard.samples[key][0]: place
            for place, key in enumerate(keys)
            if key in shard.samples
            and key in self.sequences
            and self._replica(key) == shard.record.replica
        }

    def _replica(self, key: str) -> int:
        return min(s.record.replica for s in self.shards if key in s.samples)


def about(step: Path) -> Path:
    """The folder of a step with its trace.json and weights.parquet, and with model/."""
    return step / SHARED if (step / SHARED).is_dir() else step / "rank-0"


def open_step(step: Path) -> Recorded:
    """Raises CorruptTrace if a file was changed, BadOption for a step without a complete shard or
    with those of several jobs."""
    folders = {int(m[1]): p for p in step.glob("rank-*") if (m := _RANK.fullmatch(p.name))}
    shards = [_open_shard(folders[rank]) for rank in sorted(folders)]
    jobs = {(s.record.job, s.record.ranks) for s in shards}
    if not jobs:
        raise BadOption(
            f"no rank completed its shard of {step}", "compare another step, or record it again"
        )
    if len(jobs) != 1:
        raise BadOption(
            f"{step} has the shards of {len(jobs)} jobs",
            "give each job a folder of its own; remove the shards of one of them",
        )
    [(_, ranks)] = jobs
    if ranks == 1:
        check_trace(about(step))
    else:
        read_checksums(about(step)).check(about(step), SHARED_FILES)
    return Recorded(step, about(step), shards, _lowest(shards))


def _open_shard(folder: Path) -> RecordedShard:
    record = load_record(RecordingRecord, folder / RECORDING)
    passes = [f"{name}/pass.json" for name in record.passes]
    read_checksums(folder).check(folder, (RECORDING, "tokens.parquet", *passes))
    for name in record.passes:
        check_files(folder / name, load_record(PassRecord, folder / name / "pass.json").files)
    # A rank without a chosen sequence has no tokens.
    batch = TokenBatch.load(folder / "tokens.parquet") if record.chosen else TokenBatch(())
    samples = {prefix_hash(batch.samples[i].ids): (i, batch.samples[i]) for i in record.chosen}
    return RecordedShard(folder, record, samples)


def _lowest(shards: Sequence[RecordedShard]) -> dict[str, Sample]:
    """The sequences with the lowest keys among those of all ranks."""
    every = {key: sample for shard in shards for key, (_, sample) in shard.samples.items()}

    def key_of(key: str) -> Key:
        return prefix_hash(every[key].prompt_ids), key

    lowest = set(sorted(every, key=key_of)[: shards[0].record.sequences])
    return {key: sample for key, sample in every.items() if key in lowest}
