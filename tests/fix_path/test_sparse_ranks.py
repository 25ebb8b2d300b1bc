"""vLLM whose tensor-parallel ranks share sparse layers: what one rank alone computes or holds is
named with it. Healthy pairs with the kernels: `test_pairs.py`; weights that are loaded into live
ranks: `test_weight_update.py`."""

import re
from pathlib import Path

import pytest
from command import Cli, Outcome, require_engine
from compared import compared as compare_few
from pair_models import MODELS, SPARSE

from rlk_align.data import data_path

whole_matrix = pytest.mark.whole_matrix


def compared(folder: Path, name: str, rollout: str, train: str) -> Outcome:
    model = MODELS[name].stored(folder, name, "bfloat16")
    return compare_few(folder, rollout, train, "--model", model, new_tokens=12)


@whole_matrix
@pytest.mark.parametrize("name", ["sparse", "corrected"])
def test_without_the_kernels_no_operator_is_blamed(folder: Path, name: str) -> None:
    """Ranks round their parts of a token's sum; weights are merged by expert."""
    done = compared(folder, name, "vllm:tp=2", "hf")
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
    """On prompts whose rows differ by three roundings in total, from sums before the activation."""
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
def test_a_fault_of_one_rank_is_named_with_it(folder: Path, kernels: str, op: str) -> None:
    fault = {"experts": "expert-flipped", "routing_weights": "expert-weights-unnormalised"}[op]
    rollout = f"vllm:tp=2,kernels={kernels},fault={fault}@rank1"
    done = compared(folder, "sparse", rollout, f"vllm:kernels={kernels}")
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    first = done.verdict["divergences"]["prefill_vs_train"]["first_bitwise"]
    if kernels == "rlk":
        assert (first["site"], first["ranks"]) == (f"layers.2.{op}", {"rollout": [1]})
        assert "the differing values are on rank 1 of rollout" in done.out
    else:
        # Two ranks round more often than one before that layer.
        assert first["site"] == "layers.0.o_proj"
        assert re.search(r"layers\.2\.moe_out +the rollout side is off", done.out)


@whole_matrix
@pytest.mark.parametrize("kernels", ["rlk", "off"])
def test_experts_that_one_rank_has_in_another_order_are_named_with_it(
    folder: Path, kernels: str
) -> None:
    rollout = f"vllm:tp=2,kernels={kernels},fault=experts-shuffled@rank1"
    done = compared(folder, "sparse", rollout, "hf")
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    mismatches = done.verdict["precheck"]["mismatches"]
    assert {m["name"] for m in mismatches} == {
        f"layers.2.experts.{e}.{op}" for e in (0, 1) for op in ("gate_proj", "up_proj")
    }
    assert all(m["ranks"] == [1] for m in mismatches)
