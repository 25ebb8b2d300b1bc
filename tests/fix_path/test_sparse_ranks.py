"""vLLM whose tensor-parallel ranks share sparse layers. With the kernels no bit differs from one
rank's, at any site; what one rank alone does or holds is named with it."""

import re
from pathlib import Path

import pytest
import torch
from bit_equal import Bits
from command import Cli, Outcome, command_line, require_engine, write_few_prompts
from safetensors.torch import load_file, save_file
from sparse_models import SPARSE, assert_no_bit_differs, model_of

from rlk_align.data import data_path

PATCHES = Path(__file__).resolve().parents[1] / "cli"
UPDATE = "vllm:tp=2,kernels=rlk,model={},patch=patches:update_weights"
whole_matrix = pytest.mark.whole_matrix
PAIRS = (
    ("sparse", "bfloat16", "vllm:tp=2", "megatron:dispatcher=alltoall,batch=6"),
    *(
        pytest.param(*case, marks=whole_matrix)
        for case in (
            ("sparse", "bfloat16", "vllm:tp=2", "vllm"),
            ("sparse", "bfloat16", "vllm:tp=4", "megatron:ep=2"),
            ("mixtral", "float32", "vllm:tp=2", "hf:batch=4,padding=left"),
            ("not-normalized", "bfloat16", "vllm:tp=2", "fsdp:dp=2"),
            ("corrected", "bfloat16", "vllm:tp=2", "megatron:input=packed"),
            ("one-group", "float32", "vllm:tp=2", "hf"),
        )
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse-ranks")


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def compared(cli: Cli, folder: Path, name: str, rollout: str, train: str, *more: str) -> Outcome:
    for engine in (rollout, train):
        require_engine(engine.partition(":")[0])
    return cli(
        *("compare", "--model", model_of(folder, name), "--max-new-tokens", 12),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--run-dir", folder / "run"),
        *("--rollout", rollout, "--train", train, *more),
    )


@pytest.mark.parametrize(("name", "dtype", "rollout", "train"), PAIRS)
def test_ranks_move_no_bit(
    cli: Cli, folder: Path, name: str, dtype: str, rollout: str, train: str
) -> None:
    engines = [
        f"{spec}{',' if ':' in spec else ':'}dtype={dtype},kernels=rlk" for spec in (rollout, train)
    ]
    done = compared(cli, folder, name, *engines, "--contract", "bitwise")
    assert_no_bit_differs(done)


@whole_matrix
@pytest.mark.parametrize("name", ["sparse", "corrected"])
def test_without_the_kernels_no_operator_is_blamed(cli: Cli, folder: Path, name: str) -> None:
    """Ranks round their shares of a token's sum; weights are put together by expert."""
    done = compared(cli, folder, name, "vllm:tp=2", "hf")
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 30
    assert done.verdict["precheck"]["mismatches"] == []
    reasons = " ".join(entry["reason"] for entry in done.verdict["coverage"]["unpaired"])
    assert "in one kernel, which never writes their rows" in reasons
    assert ("add up their shares of shared experts" in reasons) == (name == "corrected")


@whole_matrix
@pytest.mark.parametrize(
    ("fault", "op"),
    [
        ("", ""),
        ("router-bf16", "router"),
        ("expert-token-dropped", "moe_out"),
        ("expert-missing", "moe_out"),
    ],
)
def test_in_float32_a_fault_alone_is_blamed(cli: Cli, folder: Path, fault: str, op: str) -> None:
    """On prompts whose rows are off as a whole by three roundings, which sums before the activation
    leave."""
    require_engine("vllm")
    lines = data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = folder / "three.jsonl"
    prompts.write_text("\n".join(lines[i] for i in (3, 32, 45)) + "\n", encoding="utf-8")
    faulty = f",fault={fault}" if fault else ""
    done = cli(
        *("compare", "--model", SPARSE, "--max-new-tokens", 12, "--prompts", prompts),
        *("--rollout", f"vllm:tp=2,dtype=float32{faulty}", "--train", "hf:dtype=float32"),
        *("--run-dir", folder / "float32"),
    )
    assert done.code == (1 if fault else 0), done.out + done.err
    assert done.verdict is not None
    over = done.verdict["divergences"]["prefill_vs_train"]["over_budget"]
    named = [(f"layers.2.{op}", "rollout")] if fault else []
    assert [(o["site"], o["side"]) for o in over] == named


@whole_matrix
@pytest.mark.parametrize("kernels", ["rlk", "off"])
@pytest.mark.parametrize("op", ["experts", "routing_weights"])
def test_a_fault_of_one_rank_is_named_with_it(
    cli: Cli, folder: Path, kernels: str, op: str
) -> None:
    fault = {"experts": "expert-flipped", "routing_weights": "expert-weights-unnormalised"}[op]
    rollout = f"vllm:tp=2,kernels={kernels},fault={fault}@rank1"
    done = compared(cli, folder, "sparse", rollout, f"vllm:kernels={kernels}")
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    first = done.verdict["divergences"]["prefill_vs_train"]["first_bitwise"]
    if kernels == "rlk":
        assert (first["site"], first["ranks"]) == (f"layers.2.{op}", {"rollout": [1]})
        assert "what differs is held by rank 1 of rollout" in done.out
    else:
        # Two ranks round more than one, before that layer.
        assert first["site"] == "layers.0.o_proj"
        assert re.search(r"layers\.2\.moe_out +the rollout side is off", done.out)


@whole_matrix
@pytest.mark.parametrize("kernels", ["rlk", "off"])
def test_experts_that_one_rank_has_in_another_order_are_named_with_it(
    cli: Cli, folder: Path, kernels: str
) -> None:
    rollout = f"vllm:tp=2,kernels={kernels},fault=experts-shuffled@rank1"
    done = compared(cli, folder, "sparse", rollout, "hf")
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    mismatches = done.verdict["precheck"]["mismatches"]
    assert {m["name"] for m in mismatches} == {
        f"layers.2.experts.{e}.{op}" for e in (0, 1) for op in ("gate_proj", "up_proj")
    }
    assert all(m["ranks"] == [1] for m in mismatches)


@pytest.fixture(scope="module")
def stepped(folder: Path) -> Path:
    """The sparse model with other weights."""
    new, generator = folder / "stepped", torch.Generator().manual_seed(0)
    new.mkdir()
    (new / "config.json").write_bytes((SPARSE / "config.json").read_bytes())
    for path in SPARSE.glob("tokenizer*"):
        (new / path.name).write_bytes(path.read_bytes())
    old = load_file(SPARSE / "model.safetensors")
    tensors = {
        name: w * (1 + 0.02 * torch.randn(w.shape, generator=generator)).to(w.dtype)
        for name, w in old.items()
    }
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    return new


@whole_matrix
@pytest.mark.parametrize("stale", ["", "rank 1: layers.2.mlp.experts.3.down_proj"])
def test_ranks_get_their_share_of_an_update(
    cli: Cli, folder: Path, stepped: Path, stale: str
) -> None:
    """vLLM loads the old weights and is given the new ones by its own `load_weights`; a shard that
    was left stale is named."""
    require_engine("vllm")
    done = cli(
        *("compare", "--model", stepped, "--max-new-tokens", 8, "--contract", "bitwise"),
        *("--prompts", write_few_prompts(folder / "few.jsonl")),
        *("--run-dir", folder / f"updated-{len(stale)}"),
        *("--rollout", UPDATE.format(SPARSE), "--train", "hf:kernels=rlk"),
        env={"PYTHONPATH": str(PATCHES), "RLK_TEST_NEW": str(stepped), "RLK_TEST_STALE": stale},
        # Variables decide what these captures hold.
        shared=False,
    )
    assert done.code == (4 if stale else 0), done.out + done.err
    assert done.verdict is not None
    if stale:
        (mismatch,) = done.verdict["precheck"]["mismatches"]
        assert mismatch["name"] == "layers.2.experts.3.down_proj"
        assert mismatch["ranks"] == [1]
    else:
        assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())


@whole_matrix
def test_weights_reloaded_into_live_ranks_keep_every_bit(vllm_bits: Bits, stepped: Path) -> None:
    """By vLLM's `reload_weights`; the last case is one rank that loaded them when it started."""
    two = {"kernels": "registered", "options": {"tensor_parallel_size": 2}}
    cases = [
        two | {"name": "before", "model": str(SPARSE)},
        two | {"name": "reloaded", "model": str(SPARSE), "reload": str(stepped)},
        {"kernels": "registered", "name": "fresh", "model": str(stepped)},
    ]
    found = vllm_bits(cases)
    for what in ("tokens", "decode", "prefill"):
        assert found["reloaded"][what] == found["fresh"][what], what
    assert found["reloaded"]["decode"] == found["reloaded"]["prefill"]
    assert found["reloaded"]["decode"] != found["before"]["decode"]
