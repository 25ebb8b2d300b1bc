"""A step on disk: complete or absent, by one rank or several, and followed during the writing."""

import os
from pathlib import Path

import numpy as np
import pytest

from rlk_align.errors import DumpError, TraceNotWritten
from rlk_align.logs.monitor.run_monitor import RunMonitor
from rlk_align.logs.monitor.step_sources import open_source
from rlk_align.logs.writers import step_file
from rlk_align.logs.writers.batch import Record, batch_records
from rlk_align.logs.writers.step_file import write_step


def records(seed: int = 0) -> list[Record]:
    rng = np.random.default_rng(seed)
    g = -rng.exponential(size=(4, 9))
    return batch_records(
        token_ids=rng.integers(1, 99, size=(4, 12)),
        attention_mask=np.ones((4, 12), int),
        mask=np.ones((4, 9), int),
        rollout_logprobs=g,
        train_logprobs=g + 0.02 * np.expm1(g) * rng.standard_normal(g.shape),
    )


def test_a_folder_is_followed_step_by_step(tmp_path: Path) -> None:
    write_step(tmp_path, 0, records(), rank=0, ranks=2)
    source, monitor = open_source(tmp_path), RunMonitor()
    assert not list(source.poll(monitor, ended=False)), "one of two ranks"
    write_step(tmp_path, 0, records(1), rank=1, ranks=2)
    (found,) = source.poll(monitor, ended=False)
    assert (found.step, found.sequences) == (0, 8)
    write_step(tmp_path, 1, records(2), rank=1, ranks=2)
    assert not list(source.poll(monitor, ended=False))
    write_step(tmp_path, 1, records(3), rank=0, ranks=2)
    assert [r.step for r in source.poll(monitor, ended=False)] == [1]


def test_half_a_file_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    dump = step_file.json.dumps

    def watched(record: Record) -> str:
        seen.append([p.name for p in tmp_path.glob("*.jsonl")])
        return dump(record)

    monkeypatch.setattr(step_file.json, "dumps", watched)
    write_step(tmp_path, 0, records())
    assert seen == [[]] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000_rank_0_of_1.jsonl"]


def test_a_step_done_again_replaces_what_it_left(tmp_path: Path, imported_folder) -> None:
    for rank in range(2):
        write_step(tmp_path, 3, records(rank), rank=rank, ranks=2)
    write_step(tmp_path, 3, records(5))
    assert list(imported_folder(tmp_path).ids) == ["3-0-0", "3-0-1", "3-0-2", "3-0-3"]


@pytest.mark.parametrize(
    ("step", "rank", "made", "said"),
    [(0, 0, [], "no sample"), (-1, 0, None, "step -1"), (0, 2, None, "rank 2 of 2")],
)
def test_what_is_no_step(tmp_path: Path, step: int, rank: int, made, said: str) -> None:
    with pytest.raises(DumpError, match=said):
        write_step(tmp_path, step, records() if made is None else made, rank=rank, ranks=2)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceNotWritten, match="could not be written"):
        write_step(tmp_path / "file" / "steps", 0, records())
    assert os.listdir(tmp_path) == ["file"]
