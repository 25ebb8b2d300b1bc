"""slime's dumps, as `save_debug_train_data` writes them: format 2, and format 1 before it."""

import shutil
from pathlib import Path

import pytest
from dump_files import drawn

from rlk_align.errors import DumpError

torch = pytest.importorskip("torch")
G, T, H = drawn(0, 4), drawn(1, 4), [-x for x in drawn(2, 4)]


def columns(count: int = 2) -> dict:
    """Samples with a prompt of 2 and a response of 4, of which one token is a tool's."""
    rollout = [G[0], G[1], 0.0, G[3]]
    return {
        "tokens": [torch.tensor([5, 6, 7, 8, 9, i]) for i in range(count)],
        "total_lengths": [6] * count,
        "response_lengths": [4] * count,
        "loss_masks": [torch.tensor([1, 1, 0, 1]) for _ in range(count)],
        "rollout_log_probs": [torch.tensor(rollout) for _ in range(count)],
        "log_probs": [torch.tensor(T) for _ in range(count)],
        "entropy": [torch.tensor(H) for _ in range(count)],
        "rewards": [0.25] * count,
        "weight_versions": [["3", "4"] for _ in range(count)],
        "prefix_cache_info": [{"cached_tokens": 2} for _ in range(count)],
    }


def saved(value: object, name: str = "train_data/12.pt") -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, name)
    return Path(name)


def format_2(**changed: object) -> dict:
    data = columns()
    samples = [
        {"data_parallel_rank": 0, "sample_index": i, "rollout_position": i}
        | {name: column[i] for name, column in data.items()}
        for i in range(2)
    ]
    samples[0] |= changed
    return {
        "format_version": 2,
        "rollout_id": 12,
        "rank": 0,
        "samples": samples,
        "dp_shards": [{"rank": 0, "micro_batch_indices": [[0], [1]]}],
        "raw_reward": [1.0, 0.0],
    }


def format_1(**changed: object) -> dict:
    data = columns() | {"raw_reward": [1.0, 0.0], "micro_batch_indices": [[0], [1]]} | changed
    return {"rollout_id": 12, "rank": 3, "rollout_data": data}


@pytest.mark.parametrize("format", ["slime", "auto"])
@pytest.mark.parametrize("dump", [format_2, format_1])
@pytest.mark.parametrize("path", [".", "train_data", "train_data/12.pt"])
def test_every_field(imported, format: str, dump, path: str) -> None:
    saved(dump())
    manifest, read = imported(format, path)
    version = 2 if dump is format_2 else 1
    assert (manifest.format, manifest.version) == ("slime", f"format {version}")
    assert list(read.ids) == (["12:0", "12:1"] if version == 2 else ["12:3:0", "12:3:1"])
    assert read.steps.tolist() == [12, 12]
    assert read.token_ids.tolist() == [5, 6, 7, 8, 9, 0, 5, 6, 7, 8, 9, 1]
    assert read.prompt_lengths.tolist() == [2, 2]
    assert read.scored[:6].tolist() == [False, False, True, True, False, True]
    assert read.rollout_missing[:6].tolist() == [True, True, False, False, True, False]
    assert read.rollout[[2, 3, 5]].tolist() == [G[0], G[1], G[3]]
    assert read.train[2:6].tolist() == T
    assert read.train_missing[:6].tolist() == [True, True] + [False] * 4
    assert read.entropy[2:6].tolist() == H
    assert read.cached_tokens.tolist() == [2, 2]
    assert read.rollout_versions[:6].tolist() == [-1, -1, 3, 3, -1, 4]
    assert read.groups[0] == read.groups[1]
    assert read.rewards.tolist() == ([1.0, 0.0] if version == 2 else [0.25, 0.25])


def test_the_rollouts_own_dump_beside_it_is_left_alone(imported) -> None:
    saved(format_2())
    saved({"samples": []}, "rollout_data/12.pt")
    saved(format_2(), "train_data/2.pt")
    manifest, _ = imported("auto", ".")
    assert [source.path for source in manifest.sources] == ["train_data/2.pt", "train_data/12.pt"]


def test_format_1_under_context_parallelism_is_refused(imported) -> None:
    slices = [torch.tensor(T[:2]) for _ in range(2)]
    saved(format_1(log_probs=slices, rollout_log_probs=slices))
    with pytest.raises(
        DumpError, match="2 entries for a response of 4: it is the slice of a context"
    ):
        imported("slime", "train_data")


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["7"], [-1, -1, 7, 7, -1, 7]),
        (["7", "7", "7"], [-1, -1, 7, 7, -1, 7]),
        (["7", "8", "9"], [-1] * 6),
        (["default"], [-1] * 6),
        ([], [-1] * 6),
    ],
)
def test_versions_of_turns(imported, versions: list, expected: list) -> None:
    saved(format_2(weight_versions=versions))
    _, read = imported("slime", "train_data")
    assert read.rollout_versions[:6].tolist() == expected


def test_bf16_loses_nothing(imported) -> None:
    saved(format_2(log_probs=torch.tensor(T, dtype=torch.bfloat16)))
    _, read = imported("slime", "train_data")
    assert read.train[2:6].tolist() == torch.tensor(T, dtype=torch.bfloat16).tolist()


def test_a_zero_is_missing_outside_of_the_mask_alone(imported) -> None:
    saved(format_2(rollout_log_probs=[0.0, 0.0, 0.0, -1.0], log_probs=[-0.01, -2.0, -1.0, -1.0]))
    _, read = imported("slime", "train_data")
    assert read.scored[2:6].tolist() == [True, True, False, True]
    assert read.rollout_missing[2:6].tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"log_probs": None}, "log_probs: missing; the trainer computed none"),
        ({"rollout_log_probs": None}, "rollout_log_probs: missing; the run recorded no"),
        ({"log_probs": torch.zeros(3)}, "log_probs has 3 entries"),
        ({"log_probs": torch.zeros(4, 2)}, "log_probs"),
        ({"log_probs": "text"}, "log_probs is a text"),
        ({"loss_masks": torch.ones(3)}, "loss_masks has 3 entries"),
        ({"response_lengths": 9}, "response_lengths is 9"),
        ({"response_lengths": "4"}, "response_lengths is a text"),
        ({"tokens": torch.tensor([0.5] * 6)}, "tokens has numbers that are not integers"),
    ],
)
def test_a_wrong_value_is_named(imported, change: dict, said: str) -> None:
    saved(format_2(**change))
    with pytest.raises(DumpError, match=said):
        imported("slime", "train_data/12.pt")


@pytest.mark.parametrize(
    "value",
    [
        *([], {}, {"rollout_id": 1}, {"rollout_id": 1, "rollout_data": []}),
        {"rollout_id": 1, "rollout_data": {"response_lengths": 3}},
        {"rollout_id": None, "samples": []},
        {"format_version": 3, "rollout_id": 1, "samples": []},
        {"format_version": 2, "rollout_id": 1, "samples": 3},
        {"format_version": 2, "rollout_id": 1, "samples": [3]},
        {"format_version": 2, "rollout_id": 1, "samples": []},
    ],
)
def test_another_content_is_refused(imported, value: object) -> None:
    saved(value)
    with pytest.raises(DumpError):
        imported("slime", "train_data/12.pt")


class Planted:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize("format", ["slime", "miles", "auto"])
@pytest.mark.parametrize("legacy", [True, False])
def test_code_in_a_file_is_never_run(imported, format: str, legacy: bool) -> None:
    value = {"rollout_id": 1, "rollout_data": Planted()}
    Path("train_data").mkdir()
    torch.save(value, "train_data/1_0.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(DumpError) as raised:
        imported(format, "train_data/1_0.pt")
    assert "docs/import.md" in raised.value.fix
    assert not Path("unpickled").exists()


def test_a_file_that_is_cut_off_is_refused(imported) -> None:
    path = saved(format_2())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DumpError, match="cut off"):
        imported("slime", "train_data")
    path.write_bytes(b"")
    with pytest.raises(DumpError, match="empty"):
        imported("slime", "train_data")
    shutil.rmtree("train_data")
