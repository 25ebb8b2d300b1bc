"""DeepSpeed's own engine: gradients under ZeRO have the bits of HF's; its checkpoints are read,
damaged and hostile ones refused; faults, and frequencies that were rounded, are named."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Cli, command_line, require_engine, said_by, write_few_prompts
from hostile_pickle import Hostile
from lora import write_adapter

from rlk_align.data import data_path
from rlk_align.errors import CorruptCheckpoint, ModelError
from rlk_align.weights.holder import locate
from rlk_align.weights.pipeline import compare_weights

SCRIPT = Path(__file__).with_name("zero_gradients.py")
MASTERS = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
STATES = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    require_engine("deepspeed")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients and checkpoints of two ranks."""
    out = tmp_path_factory.mktemp("zero")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said_by("deepspeed", [*words, str(SCRIPT), str(out)], timeout=500)
    return out


def all_equal(out: Path) -> None:
    found = json.loads((out / "gradients.json").read_text())
    assert len(found) == 12, "four stages in three modes"
    assert {name: n for name, n in found.items() if n != [45, 45]} == {}


@pytest.mark.timeout(600)
def test_gradients_of_two_ranks_have_the_bits_of_hf(saved: Path) -> None:
    all_equal(saved)


@pytest.mark.whole_matrix
@pytest.mark.timeout(600)
def test_gradients_of_one_rank_have_the_bits_of_hf(tmp_path: Path) -> None:
    """Of two micro-batches."""
    said_by("deepspeed", [str(SCRIPT), str(tmp_path)], timeout=500)
    all_equal(tmp_path)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_an_adapter_have_the_bits_of_hf(tmp_path: Path, ranks: int) -> None:
    adapter = write_adapter(tmp_path / "a", data_path("model"), alpha=5.0, std=0.05)
    words = [str(SCRIPT), str(tmp_path), "0,1,2,3", str(adapter)]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    said_by("deepspeed", words, timeout=500)
    found = json.loads((tmp_path / "gradients.json").read_text())
    assert found == {f"{m} rlk {n}": [56, 56] for n in range(4) for m in ("bf16", "autocast")}


def statuses(a: Path, b: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for finding in compare_weights(str(a), str(b)).findings:
        counts[finding.status] = counts.get(finding.status, 0) + 1
    return counts


@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_holds_what_was_trained(saved: Path, stage: int) -> None:
    # Under ZeRO-3 the masters of two ranks are joined; what is not trained has no master.
    frozen = {"cast": 46, "equal": 1}
    found = statuses(saved / f"stage{stage}", saved / f"live{stage}")
    assert found == (frozen if stage == 3 else {"equal": 47})
    [inner] = (saved / f"stage{stage}").glob("global_step*")
    assert locate(str(inner), "train").kind.startswith("DeepSpeed")


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a checkpoint in which one file is changed."""

    def make(stage: int, name: str, change: Callable[[Path], Any]) -> Path:
        copy = tmp_path / "changed"
        shutil.copytree(saved / f"stage{stage}", copy)
        [file] = copy.glob(f"global_step*/{name}")
        change(file)
        return copy

    return make


def test_a_rank_that_saved_another_step_is_seen(saved: Path, changed) -> None:
    """Rank 1's masters are of rank 0: half of every parameter is another's."""
    other = changed(3, MASTERS.format(1), lambda f: shutil.copy(f.with_name(MASTERS.format(0)), f))
    found = statuses(other, saved / "live3")
    assert found["equal"] == 1
    assert found["other"] > 40


@pytest.mark.parametrize("name", [MASTERS, STATES])
def test_a_missing_rank_is_named(changed, name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="has no zero_pp_rank_0_mp_rank_00"):
        locate(str(changed(3, name.format(0), os.remove)), "train")


def test_masters_of_too_few_ranks_are_refused(changed) -> None:
    with pytest.raises(CorruptCheckpoint, match="of 2 and 1 ranks, and was written by 2"):
        locate(str(changed(3, MASTERS.format(1), os.remove)), "train")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("stage", "name"), [(1, "mp_rank_00_model_states.pt"), (3, MASTERS.format(1))]
)
def test_a_truncated_file_is_refused(changed, stage: int, name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=name):
        locate(str(changed(stage, name, truncate)), "train")


def test_a_hostile_pickle_does_nothing(changed, tmp_path: Path) -> None:
    def replace(file: Path) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            stolen = Hostile(tmp_path / "stolen")
            archive.writestr("x/data.pkl", pickle.dumps({"module": {"a.weight": stolen}}))

    with pytest.raises(CorruptCheckpoint, match="a tensor is made by mkdir"):
        locate(str(changed(1, "mp_rank_00_model_states.pt", replace)), "train")
    assert not (tmp_path / "stolen").exists()


def test_tensor_parallel_ranks_are_refused(changed) -> None:
    def another(file: Path) -> None:
        shutil.copy(file, file.with_name("mp_rank_01_model_states.pt"))

    with pytest.raises(ModelError, match=r"tensor-parallel ranks .* not read"):
        locate(str(changed(1, "mp_rank_00_model_states.pt", another)), "train")


def test_a_latest_that_names_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CorruptCheckpoint, match=r"names '\.\./elsewhere'"):
        locate(str(tmp_path), "train")


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return command_line(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_few_prompts(tmp_path_factory.mktemp("prompts") / "few.jsonl")


FLAGS = ("--max-new-tokens", 8, "--edges", "prefill_vs_train")


@pytest.mark.parametrize(
    "options", ["buffers=bf16", pytest.param("zero_init=1", marks=pytest.mark.whole_matrix)]
)
def test_rounded_frequencies_are_named(cli: Cli, few: Path, options: str) -> None:
    done = cli(
        "compare", "--prompts", few, "--rollout", "hf", "--train", f"deepspeed:{options}", *FLAGS
    )
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    [found] = done.verdict["precheck"]["mismatches"]
    assert found["name"] == "rope_frequencies"
    assert (found["rollout"], found["train"]) == ("exact", "rounded to bfloat16")
    said = " ".join(done.out.split())
    assert "the trainer's inverse frequencies were rounded to bfloat16." in said


def test_kernels_refuse_rounded_frequencies(cli: Cli, few: Path) -> None:
    done = cli(
        *("compare", "--prompts", few, "--rollout", "hf:kernels=rlk", *FLAGS),
        *("--train", "deepspeed:kernels=rlk,buffers=bf16"),
    )
    assert done.code == 2, done.out + done.err
    assert "inv_freq was rounded to torch.bfloat16" in " ".join(done.err.split())


def test_a_hook_of_somebody_else_is_refused_beside_those_of_zero(cli: Cli, few: Path) -> None:
    """ZeRO-3 puts hooks on every module; `test_pairs.py` has the kernels run with those alone."""
    tests = {"PYTHONPATH": str(Path(__file__).parent)}
    done = cli(
        *("compare", "--prompts", few, "--rollout", "hf:kernels=rlk", *FLAGS),
        *("--train", "deepspeed:kernels=rlk,patch=zero_patches:hook_on_an_activation"),
        env=tests,
    )
    assert done.code == 2, done.out + done.err
    said = " ".join(done.err.split())
    assert "SiLUActivation with hooks, of which zero_patches.doubled is not ZeRO's" in said


FAULTS = {
    "deepspeed:dp=2": "norm-output-fp8,rope-key-position,proj-gain,weight-norm",
    "deepspeed:stage=1": "attn-scale,act-swapped,residual-branch,weight-element",
}


@pytest.mark.parametrize(
    "engine", ["deepspeed:dp=2", pytest.param("deepspeed:stage=1", marks=pytest.mark.whole_matrix)]
)
def test_planted_faults_are_named_with_their_side(
    cli: Cli, few: Path, tmp_path: Path, engine: str
) -> None:
    out = tmp_path / "out.json"
    done = cli(
        *("selftest", "--engines", f"hf,{engine}", "--faults", FAULTS[engine], "--seeds", 1),
        *("--no-curves", "--prompts", few, "--run-dir", tmp_path / "run"),
        *("--output", f"json={out}"),
        shared=False,
    )
    assert done.code == 0, done.out + done.err
    found = json.loads(out.read_text())
    seen = {(d["fault"], d["side"]): d for d in found["detections"]}
    names = FAULTS[engine].split(",")
    assert seen.keys() == {(name, side) for name in names for side in ("rollout", "train")}
    for (_, side), d in seen.items():
        assert d["seen"] == ("precheck" if d["expected"] == "precheck" else "named"), d
        assert d["found_side"] in (side, None), d
        assert d["others"] == [], d
    assert [clean["alarms"] for clean in found["clean"]] == [[]]


def test_a_stale_copy_of_one_rank_is_named(cli: Cli, few: Path) -> None:
    """Below ZeRO-3 each rank computes with a copy of its own."""
    done = cli(
        *("compare", "--prompts", few, "--rollout", "hf", *FLAGS),
        *("--train", "deepspeed:dp=2,stage=1,fault=weight-norm@rank1"),
    )
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    assert [m["ranks"] for m in done.verdict["precheck"]["mismatches"]] == [[1]]
