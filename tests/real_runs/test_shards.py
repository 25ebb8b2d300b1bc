"""Distributed checkpoints that FSDP2 and Megatron wrote, on two ranks each."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from changed_weights import save, tensors, unequal
from command import require_engine, said_by

from rlk_align.data import data_path
from rlk_align.errors import CorruptCheckpoint, ModelError
from rlk_align.weights.pipeline import compare_weights

SCRIPT = Path(__file__).with_name("save_shards.py")


@pytest.fixture(scope="module", params=["fsdp", "megatron"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_engine(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    kind = "hf" if request.param == "fsdp" else request.param
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(SCRIPT), request.param, str(folder)]
    said_by(kind, words, {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    shutil.copy(data_path("model") / "config.json", folder)
    return folder


def test_shards_are_the_checkpoint_that_they_were_loaded_from(saved: Path) -> None:
    report = compare_weights(str(data_path("model")), str(saved / "step-1"))
    assert report.exit_code == 0, unequal(report)
    assert report.compared == len(report.findings) >= 46
    assert report.kinds[1] == "distributed checkpoint"


def test_a_slice_that_one_rank_did_not_update(saved: Path) -> None:
    """FSDP shards q_proj by rows; rank 1 of Megatron has the last rows of both gate and up."""
    report = compare_weights(str(saved / "step-2"), str(saved / "synced"))
    found = unequal(report)
    rows = "rows 256-511"
    names = {"layers.1.gate_proj", "layers.1.up_proj"}
    if "fsdp" in saved.name:
        rows, names = "rows 128-255", {"layers.1.q_proj"}
    assert found.keys() == names
    for finding in found.values():
        assert (finding.status, finding.step, finding.ranks) == ("stale", "step 1", [1])
        assert finding.detail == f"B rank 1: {rows} differ: they are those of step 1"


def test_damage_is_named(saved: Path, tmp_path: Path) -> None:
    whole = str(data_path("model"))
    copy = tmp_path / "copy"
    shutil.copytree(saved / "step-1", copy)
    files = sorted(copy.glob("*.distcp"))
    last = files[-1]
    data = last.read_bytes()
    last.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpoint, match=rf"{last.name} is truncated"):
        compare_weights(whole, str(copy))
    last.write_bytes(bytes(len(data)))
    with pytest.raises(CorruptCheckpoint, match=rf"{last.name}: the tensor at byte .* is damaged"):
        compare_weights(whole, str(copy))
    last.unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"{last.name} cannot be read"):
        compare_weights(whole, str(copy))
    described = (copy / ".metadata").read_bytes()
    for damaged in (described[:-40], b"", b"\x00" * 64, described[:100] + described[200:]):
        (copy / ".metadata").write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata does not describe"):
            compare_weights(whole, str(copy))


def test_the_folder_above_names_what_is_in_it(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights") as error:
        compare_weights(str(saved), save(tmp_path / "a", tensors()))
    assert error.value.fix.endswith("step-1, step-2, synced")
