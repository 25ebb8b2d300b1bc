"""Which steps of a side are complete, which requests of a step are recorded, and what `--steps`
refuses."""

import random
from pathlib import Path
from typing import Any

import pytest
from command import Cli

from rlk_align.api.pair import Pair
from rlk_align.api.steps import recorded_steps
from rlk_align.errors import BadOption, ToolError
from rlk_align.record.shared.choose import LowestPrompts, Prompts, lowest_prompts
from rlk_align.record.shared.layout import REASON, RECORDING, incomplete_steps, next_step, steps_of
from rlk_align.record.shared.shard import SideFolder


@pytest.mark.parametrize("count", [1, 3, 50])
def test_a_server_records_what_a_batch_would(count: int) -> None:
    draw = random.Random(count)
    prompts = [[draw.randrange(12), draw.randrange(4)] for _ in range(40)]
    online = LowestPrompts(count)
    offered = [i for i, prompt in enumerate(prompts) if online.offer(prompt)]
    wanted = lowest_prompts(prompts, count)
    assert set(wanted) <= set(offered)
    # What was offered in the order of its hashes is chosen without any that is displaced.
    again = LowestPrompts(count)
    assert [i for i in wanted if again.offer(prompts[i])] == wanted


def test_a_partial_shard_is_no_step(tmp_path: Path) -> None:
    for step, shard in ((0, "rank-0"), (50, "rank-0.partial"), (100, "rank-0.partial")):
        folder = tmp_path / f"step-{step:08d}" / shard
        folder.mkdir(parents=True)
        (folder / RECORDING).write_text("{}")
    (tmp_path / "step-00000050/rank-0.partial" / REASON).write_text("the disk was full")
    assert list(steps_of(tmp_path)) == [0]
    lost = incomplete_steps(tmp_path)
    assert list(lost) == [50, 100]
    assert lost[50] == "the disk was full"
    assert "process was ended" in lost[100]
    assert next_step(tmp_path) == 101


def test_an_abandoned_step_keeps_its_reason_and_nothing_else(tmp_path: Path) -> None:
    side = SideFolder(tmp_path / "side", "rollout", 1)
    with pytest.raises(ToolError, match="another process"):
        SideFolder(tmp_path / "side", "rollout", 1)
    shard = side.begin(7)
    (shard.path / "values").write_bytes(b"x")
    shard.abandon("the disk was full")
    assert incomplete_steps(side.path) == {7: "the disk was full"}
    assert [path.name for path in shard.path.iterdir()] == [REASON]
    side.begin(7).complete()
    with pytest.raises(BadOption, match="recorded already"):
        side.begin(7)
    side.close()


def test_a_side_without_a_complete_step_says_why(cli: Cli, tmp_path: Path) -> None:
    for side, shard in (("rollout", "rank-0"), ("train", "rank-0.partial")):
        folder = tmp_path / side / "step-00000003" / shard
        folder.mkdir(parents=True)
        (folder / RECORDING).write_text("{}")
    (tmp_path / "train/step-00000003/rank-0.partial" / REASON).write_text("the disk was full")
    for other, said in (
        ("train", "has no complete step: step 3: the disk was full"),
        ("nothing", "nothing does not exist"),
        ("", f"and {tmp_path} is no recording"),
    ):
        done = cli("compare", tmp_path / "rollout", tmp_path / other, "--run-dir", tmp_path / "run")
        assert done.code == 2
        assert said in " ".join(done.err.split())


@pytest.mark.parametrize("prompts", [["a text"], [[1, 2], "three"], [[[1, 2]]], 5])
def test_prompts_are_token_ids(prompts: Any) -> None:
    with pytest.raises(BadOption, match="not lists of token ids"):
        Prompts(prompts)


def test_steps_are_numbers_of_two_sides(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="no list of steps"):
        recorded_steps(Pair(), ["a", "b"], "1,x")
    with pytest.raises(BadOption, match="recordings of two sides"):
        recorded_steps(Pair(), [str(tmp_path), str(tmp_path)], "1")
    for side, step in (("rollout", 0), ("rollout", 1), ("train", 1)):
        folder = tmp_path / side / f"step-{step:08d}/rank-0"
        folder.mkdir(parents=True)
        (folder / RECORDING).write_text("{}")
    sides = [str(tmp_path / "rollout"), str(tmp_path / "train")]
    found = recorded_steps(Pair(run_dir=tmp_path / "run"), sides, "0,1,2")
    assert list(found.folders) == [1]
    assert found.missing == {
        0: "train: it was not recorded",
        2: "rollout: it was not recorded; train: it was not recorded",
    }
