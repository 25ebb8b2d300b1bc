"""LoRA adapters in real engines: healthy pairs, and planted faults that are named."""

from pathlib import Path

import pytest
from command import Cli, Outcome, command_line, require_engine
from lora import Factors, changed_adapter, write_adapter, write_merged
from random_model import write_random_model

pytestmark = pytest.mark.whole_matrix
pytest.importorskip("peft")

VLLM, HF = "vllm:lora={a}", "hf:lora={a}"
PATCH = "patch=lora_patches:"


def without_b(factors: Factors) -> Factors:
    """As PEFT starts an adapter."""
    return {name: x * 0 if "lora_B" in name else x for name, x in factors.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("lora")
    model = write_random_model(here / "model", model_type="qwen3", head_dim=32, dtype="bfloat16")
    write_adapter(here / "a", model, std=0.05)
    write_adapter(here / "b", model, rank=8, alpha=5.0, targets=("q_proj", "down_proj"), std=0.05)
    changed_adapter(here / "zero", here / "a", without_b)
    write_merged(here / "merged", model, here / "a")
    lines = (f'{{"id": "{i}", "ids": {[7 * i + k * k for k in range(1, 9)]}}}' for i in range(1, 5))
    (here / "prompts.jsonl").write_text("\n".join(lines))
    return here


@pytest.fixture(scope="module")
def cli(folder: Path) -> Cli:
    return command_line(folder)


def compared(cli: Cli, folder: Path, rollout: str, train: str, *flags: str) -> Outcome:
    for spec in (rollout, train):
        require_engine(spec.partition(":")[0])
    names = {name: folder / name for name in ("a", "b", "zero", "merged")}
    return cli(
        "compare", "--model", folder / "model", "--prompts", folder / "prompts.jsonl",
        "--max-new-tokens", 16, "--run-dir", folder / "run", "--fresh",
        "--rollout", rollout.format(**names), "--train", train.format(**names),
        *flags,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rollout", "train", "weights"),
    [
        (VLLM, HF, "equal"),
        (VLLM, "fsdp:dp=2,lora={a}", "equal"),
        (VLLM, "fsdp:dp=2,mixed=0,lora={a}", "equal"),
        (VLLM, "deepspeed:dp=2,lora={a}", "equal"),
        (VLLM, "deepspeed:stage=1,mixed=autocast,lora={a}", "equal"),
        (VLLM, "deepspeed:lora={a},merged=1", "merged on the training side"),
        (VLLM, f"{HF},merged=1", "merged on the training side"),
        ("vllm:model={merged}", HF, "merged on the rollout side"),
        ("vllm:model={merged}", "fsdp:dp=2,lora={a},merged=1", "equal"),
    ],
)
def test_a_pair_with_an_adapter_is_healthy(
    cli: Cli, folder: Path, rollout: str, train: str, weights: str
) -> None:
    done = compared(cli, folder, rollout, train)
    verdict = done.verdict
    assert verdict is not None, done.err
    assert verdict["status"] == "pass"
    assert verdict["precheck"]["weights"] == weights
    assert "no operator beyond its budget on either side: 76 of 76" in done.out


@pytest.mark.parametrize(
    ("rollout", "train", "words"),
    [
        (f"{VLLM},{PATCH}k_and_v_exchanged", HF, "exchanged, or stacked in another order"),
        (
            f"{VLLM},{PATCH}gate_and_up_exchanged",
            HF,
            "of layers.0.gate_proj is the rollout's of layers.0.up_proj",
        ),
        (f"{VLLM},{PATCH}withheld", HF, "the rollout was given one that no projection computes"),
        ("vllm", f"{HF},merged=1", "; the other side has no adapter, and other weights"),
        ("vllm", HF, "the rollout has no adapter; the trainer has one of rank 4 in 14 projections"),
        (VLLM, f"{HF},{PATCH}never_scaled", "the scale was applied twice on one of them, or not"),
        (VLLM, f"{HF},{PATCH}scaled_twice", "the scale was applied twice on one of them"),
        (
            VLLM,
            f"{HF},{PATCH}b_of_an_earlier_step",
            "B has other values in 14 projections, q_proj, k_proj, v_proj, o_proj, gate_proj, "
            "up_proj, down_proj of layers.0, layers.1; A is equal: an adapter of another step",
        ),
        (VLLM, f"{HF},{PATCH}a_in_float16", "; B is equal: the trainer's A was cast to float16"),
        (VLLM, f"{HF},{PATCH}dropout_on", "is in training mode and drops values at random"),
        (VLLM, f"{HF},{PATCH}half_of_the_layers", "the trainer has no adapter in 7 projections"),
        (VLLM, f"{HF},{PATCH}merged_and_unmerged", "by merging and unmerging its adapter in 14"),
        (VLLM, f"{HF},{PATCH}counted_twice", "it counts twice"),
    ],
)
def test_a_fault_is_named(cli: Cli, folder: Path, rollout: str, train: str, words: str) -> None:
    done = compared(cli, folder, rollout, train)
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "inconclusive"
    details = [m["detail"] for m in done.verdict["precheck"]["mismatches"]]
    assert any(words in detail for detail in details), details


def test_an_adapter_that_changes_nothing_is_said_and_perturbed(cli: Cli, folder: Path) -> None:
    """A trainer that never applies it is found with `--perturb-lora` alone."""
    sides = "vllm:lora={zero}", f"hf:lora={{zero}},{PATCH}never_scaled"
    done = compared(cli, folder, *sides)
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "pass"
    (said,) = done.verdict["precheck"]["mismatches"]
    assert "--perturb-lora compares copies with other numbers in B" in said["detail"]
    done = compared(cli, folder, *sides, "--perturb-lora")
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "inconclusive"
    (said,) = done.verdict["precheck"]["mismatches"]
    assert "the scale was applied twice on one of them, or not at all" in said["detail"]
    done = compared(cli, folder, "vllm:lora={zero}", "hf:lora={zero}", "--perturb-lora")
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "pass"
    assert done.verdict["precheck"]["mismatches"] == []
    done = compared(cli, folder, "vllm:lora={a}", "hf:lora={a}", "--perturb-lora")
    assert done.code == 2
    assert "no B of" in done.err


@pytest.mark.parametrize("order", ["{a}+{b}", "{b}+{a}"])
def test_requests_have_adapters_in_turn(cli: Cli, folder: Path, order: str) -> None:
    done = compared(cli, folder, f"vllm:lora={order}", f"hf:lora={order}")
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "pass"
    assert done.verdict["precheck"]["weights"] == "equal"
    assert "no operator beyond its budget on either side: 76 of 76" in done.out


def test_adapters_in_another_order_are_named(cli: Cli, folder: Path) -> None:
    done = compared(cli, folder, "vllm:lora={a}+{b}", "hf:lora={b}+{a}")
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "inconclusive"
    details = [m["detail"] for m in done.verdict["precheck"]["mismatches"]]
    assert any(detail.startswith("adapter 1 of 2: ") for detail in details), details
    assert any(detail.startswith("adapter 2 of 2: ") for detail in details), details


def test_a_request_without_an_adapter_beside_others(cli: Cli, folder: Path) -> None:
    """vLLM 0.32 on a CPU looks up its adapter by the index -1, which is that of the last one."""
    sides = "{engine}:lora={{a}}+{{b}}+none{more}"
    both = [sides.format(engine=e, more=",kernels=rlk") for e in ("vllm", "hf")]
    done = compared(cli, folder, *both, "--contract", "bitwise")
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "pass", done.out
    assert done.verdict["precheck"]["weights"] == "equal"
    done = compared(cli, folder, *(sides.format(engine=e, more="") for e in ("vllm", "hf")))
    assert done.verdict is not None, done.err
    assert done.verdict["status"] == "fail"
    said = " ".join(done.out.split())
    assert "FAIL A bug: layers.0.q_proj, the rollout side is off." in said
    assert "layers.0.v_proj the rollout side is off" not in said
