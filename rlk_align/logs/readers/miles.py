"""miles: `train_data/{rollout_id}_{rank}.pt`, a file for each rank of the last pipeline stage.

Tensor-parallel ranks write the same samples; the copies must be equal, and one of them is read.
Context-parallel ranks write zig-zag slices of each response, which are joined.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.missing import ZERO_IS_MISSING
from rlk_align.logs.readers.torch_files import (
    PER_RESPONSE,
    checked,
    is_torch_file,
    load,
    plain,
    row,
    transposed,
)
from rlk_align.logs.readers.values import WrongValue, whole_number
from rlk_align.logs.readers.zigzag import ranks_of_slices, response_tokens
from rlk_align.progress import Progress


@dataclass(frozen=True)
class Part:
    """The part of a rollout that one rank wrote."""

    path: Path
    samples: list[dict[str, Any]]
    cp_rank: int | None
    cp_size: int | None
    padded: bool
    """Whether sequences were padded to one length before they were sliced."""

    @property
    def lengths(self) -> list[int]:
        return [len(sample["log_probs"]) for sample in self.samples]

    @property
    def responses(self) -> list[int]:
        return [sample["response_lengths"] for sample in self.samples]

    @property
    def totals(self) -> list[int]:
        return [len(sample["tokens"]) for sample in self.samples]


def read(files: list[Path], findings: Findings, progress: Progress) -> Iterator[Row]:
    """Yields the samples, rollout by rollout. Raises DumpError."""
    findings.note(ZERO_IS_MISSING)
    rollouts: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        rollouts[path.stem.rpartition("_")[0]].append(path)
    ordered = sorted(rollouts.items(), key=lambda item: (len(item[0]), item[0]))
    for number, (name, paths) in enumerate(ordered, 1):
        progress(f"reading rollout {name}", number, len(rollouts))
        shards: dict[str, list[Part]] = defaultdict(list)
        steps = set()
        for path in sorted(paths):
            try:
                step, part = _part(path, load(path, findings))
            except WrongValue as error:
                raise DumpError(f"{path}: {error}", "see docs/import.md") from error
            steps.add(step)
            shards[_digest(part)].append(part)
        if len(steps) > 1:
            raise DumpError(
                f"{paths[0].parent}: files of {name} are of rollouts {sorted(steps)}",
                "import them separately",
            )
        for shard, parts in enumerate(shards.values()):
            try:
                samples = _joined(parts, findings)
                rows = [row(s, step, f"{step}:{shard}:{i}") for i, s in enumerate(samples)]
            except WrongValue as error:
                raise DumpError(f"{parts[0].path}: {error}", "see docs/import.md") from error
            yield from rows


def _part(path: Path, dump: dict[str, Any]) -> tuple[int, Part]:
    samples = [checked(sample) for sample in transposed(dump.get("rollout_data"))]
    rank, size = (plain(dump.get(key)) for key in ("cp_rank", "cp_size"))
    known = isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size
    part = Part(
        path=path,
        samples=samples,
        cp_rank=rank if known else None,
        cp_size=size if known else None,
        padded=dump.get("qkv_format") == "bshd",
    )
    return whole_number(plain(dump.get("rollout_id")), "rollout_id"), part


def _digest(part: Part) -> str:
    """Returns a digest that is equal for ranks with the same samples."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in part.samples:
        ids = np.ascontiguousarray(np.asarray(sample["tokens"]), dtype="<i8")
        digest.update(f"{len(ids)} {sample.get('sample_indices')} ".encode() + ids.tobytes())
    return digest.hexdigest()


def _joined(parts: list[Part], findings: Findings) -> list[dict[str, Any]]:
    """Returns whole samples, joined from the parts of all ranks."""
    whole = all(part.lengths == part.responses for part in parts)
    parts = _without_copies(parts, findings, of_any_rank=whole)
    if whole:
        return parts[0].samples
    ranks = _ranks(parts)
    return [_whole(parts, ranks, i) for i in range(len(parts[0].samples))]


def _ranks(parts: list[Part]) -> list[int]:
    """Returns the context-parallel rank of each part. Raises WrongValue if a rank is missing, or
    if the ranks cannot be determined."""
    stated = [part.cp_rank for part in parts if part.cp_rank is not None]
    if len(stated) == len(parts):
        size = parts[0].cp_size
        if sorted(stated) != list(range(size or 0)):
            raise WrongValue(f"only {sorted(stated)} of {size} context-parallel ranks exist")
        return stated
    ranks = None
    if not stated and not parts[0].padded:
        ranks = ranks_of_slices([p.lengths for p in parts], parts[0].totals, parts[0].responses)
    if ranks is None:
        raise WrongValue(
            "the positions of its context-parallel slices are unknown, because it does not record "
            "its rank: use a later miles, which writes cp_rank"
        )
    return ranks


def _without_copies(parts: list[Part], findings: Findings, of_any_rank: bool) -> list[Part]:
    """Removes parts with bitwise the same values as another part. Raises WrongValue if two parts
    differ that should be equal: parts of one context-parallel rank, or of any rank."""
    distinct: dict[tuple[bytes, int | None], Part] = {}
    for part in parts:
        digest = hashlib.blake2b(digest_size=16)
        for sample in part.samples:
            for field in PER_RESPONSE:
                if sample.get(field) is not None:
                    values = np.ascontiguousarray(np.asarray(sample[field]), dtype="<f8")
                    digest.update(len(values).to_bytes(8, "little") + values.tobytes())
        key = digest.digest(), None if of_any_rank else part.cp_rank
        if key in distinct:
            findings.note("copies of tensor-parallel ranks are equal bit for bit; one is kept")
        distinct.setdefault(key, part)
    ranks = [rank for _, rank in distinct if rank is not None]
    if len(set(ranks)) < len(ranks) or (of_any_rank and len(distinct) > 1):
        other = list(distinct.values())[1].path
        raise WrongValue(f"{other} has the same samples with other values: copies differ")
    return list(distinct.values())


def _whole(parts: list[Part], ranks: list[int], i: int) -> dict[str, Any]:
    """Returns sample i, joined from its slices."""
    sample = dict(parts[0].samples[i])
    total, response = parts[0].totals[i], parts[0].responses[i]
    padded = None
    if parts[0].padded:
        if sample.get("max_seq_lens") is None:
            raise WrongValue("max_seq_lens: missing, and padded sequences are cut by it")
        padded = whole_number(plain(sample["max_seq_lens"]), "max_seq_lens")
    for field in PER_RESPONSE:
        if sample.get(field) is None:
            continue
        values = np.full(response, np.nan)
        filled = np.zeros(response, dtype=bool)
        for part, rank in zip(parts, ranks, strict=True):
            tokens = response_tokens(total, response, rank, len(parts), padded)
            if part.samples[i].get(field) is None:
                raise WrongValue(f"{field} of sample {i}: missing in {part.path}")
            part_values = np.asarray(part.samples[i][field], dtype=np.float64)
            if len(part_values) == response:
                # This field is not sliced: every rank has it whole.
                tokens = np.arange(response)
            if len(part_values) != len(tokens):
                raise WrongValue(
                    f"{field} of sample {i} has {len(part_values)} entries, but rank {rank} of "
                    f"{len(parts)} scores {len(tokens)} tokens of its response of {response}"
                )
            values[tokens], filled[tokens] = part_values, True
        if not filled.all():
            raise WrongValue(f"{field} of sample {i}: no rank has {int((~filled).sum())} tokens")
        sample[field] = pa.array(values)
    return sample


def recognises(path: Path) -> bool:
    """Whether miles wrote a file: it has `cp_rank`, or in earlier versions a rank in its name."""
    if not is_torch_file(path):
        return False
    dump = load(path)
    return "rollout_data" in dump and ("cp_rank" in dump or path.stem.rpartition("_")[2].isdigit())


READER = Reader(
    name="miles",
    framework="miles",
    patterns=("train_data/*_*.pt",),
    recognises=recognises,
    read=read,
)
