"""slime and its fork vime: `train_data/{rollout_id}.pt`, in format 2 or 1.

Index i of the log-probs scores response token i. With context parallelism, format 1 has one rank's
slice without the number of the rank, so it is refused. Format 2 has whole responses.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.missing import ZERO_IS_MISSING
from rlk_align.logs.readers.torch_files import checked, is_torch_file, load, plain, row, transposed
from rlk_align.logs.readers.values import WrongValue, whole_number
from rlk_align.progress import Progress

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
    if version == FORMAT:
        listed, rank = dump.get("samples"), ""
        if not isinstance(listed, list):
            raise WrongValue("samples is not a list")
        samples = [checked(sample) for sample in listed]
    elif version == 1:
        samples = [checked(sample) for sample in transposed(dump.get("rollout_data"))]
        rank = f":{plain(dump.get('rank', 0))}"
        _refuse_slices(samples)
    else:
        raise WrongValue(f"format_version is {version}; 1 and {FORMAT} are known")
    rewards = dump.get("raw_reward")
    if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
        rewards = [None] * len(samples)
    for i, sample in enumerate(samples):
        place = sample.get("rollout_position")
        place = place if isinstance(place, int) and 0 <= place < len(samples) else i
        yield row(sample, step, f"{step}{rank}:{place}", rewards[place])


def _refuse_slices(samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        length, found = sample["response_lengths"], len(sample["log_probs"])
        if found != length:
            raise WrongValue(
                f"log_probs has {found} entries for a response of {length}: it is the slice of a "
                "context-parallel rank, whose position format 1 does not state; use slime of "
                "2026-08-12 or later, which writes format 2"
            )


def recognises(path: Path) -> bool:
    """Whether slime wrote a file. Format 1 differs from miles' format only in the file's name."""
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
