"""slime and its fork vime: `train_data/{rollout_id}.pt`, in format 2 or 1.

Log-probs are of the response: index i scores response token i. Under context parallelism format 1
holds one rank's slice without saying which, so it is refused; format 2 holds whole responses.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlk_align.dumps.batches import Row
from rlk_align.dumps.manifest import Findings
from rlk_align.errors import DumpError
from rlk_align.progress import Progress
from rlk_align.readers.base import Reader
from rlk_align.readers.missing import ZERO_IS_MISSING
from rlk_align.readers.torch_files import is_torch_file, load, plain, row, transposed
from rlk_align.readers.values import WrongValue, whole_number

FORMAT = 2


def read(files: list[Path], findings: Findings, progress: Progress) -> Iterator[Row]:
    """Yields the samples of each file. Raises DumpError."""
    findings.note(ZERO_IS_MISSING)
    for number, path in enumerate(sorted(files, key=lambda path: (len(path.name), path)), 1):
        progress(f"reading {path.name}", number, len(files))
        try:
            yield from _rows(load(path, findings), findings)
        except WrongValue as error:
            raise DumpError(f"{path}: {error}", "see docs/import.md") from error


def _rows(dump: dict[str, Any], findings: Findings) -> Iterator[Row]:
    step = whole_number(plain(dump.get("rollout_id")), "rollout_id")
    version = dump.get("format_version", 1)
    findings.version = f"format {version}"
    rewards = dump.get("raw_reward")
    if version == FORMAT:
        samples = dump.get("samples")
        if not isinstance(samples, list) or not all(isinstance(s, dict) for s in samples):
            raise WrongValue("samples is no list of dictionaries")
    elif version == 1:
        samples = transposed(_rollout_data(dump))
        _refuse_slices(samples)
    else:
        raise WrongValue(f"format_version is {version}; 1 and {FORMAT} are known")
    for i, sample in enumerate(samples):
        place = plain(sample.get("rollout_position", i))
        known = isinstance(rewards, list | tuple) and len(rewards) == len(samples)
        rank = "" if version == FORMAT else f":{plain(dump.get('rank', 0))}"
        yield row(sample, step, f"{step}{rank}:{place}", rewards[place] if known else None)


def _rollout_data(dump: dict[str, Any]) -> dict[str, Any]:
    data = dump.get("rollout_data")
    if not isinstance(data, dict):
        raise WrongValue("rollout_data is no dictionary")
    return data


def _refuse_slices(samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        length = plain(sample["response_lengths"])
        values = sample.get("log_probs")
        if values is not None and len(values) != length:
            raise WrongValue(
                f"log_probs has {len(values)} entries of a response of {length}: the slice of a "
                "context-parallel rank, which format 1 does not place; use slime of 2026-08-12 or "
                "later, which writes format 2"
            )


def recognises(path: Path) -> bool:
    """Whether a file is slime's. Format 1 is told from miles' by the names of files alone."""
    if not is_torch_file(path):
        return False
    dump = load(path)
    if dump.get("format_version") == FORMAT:
        return "samples" in dump
    return "rollout_data" in dump and "cp_rank" not in dump and "_" not in path.stem


READER = Reader(
    name="slime",
    framework="slime",
    patterns=("train_data/*.pt",),
    recognises=recognises,
    read=read,
)
