"""Engines whose numbers are known: layouts that are equal in every bit, and where others first
differ. Healthy pairs of any two engines: `test_healthy_pairs.py`."""

import json
from pathlib import Path

import pytest
import torch
from command import Cli, Outcome, command_line, require_engine, values, write_few_prompts
from pair_models import SPARSE
from safetensors.torch import load_file

from rlk_align.data import data_path

NEW_TOKENS = ("--max-new-tokens", 6)
EXPERTS = {"gate_proj", "up_proj", "act", "down_proj"}
"""What vLLM computes in one kernel."""
EDGE = ("--edges", "prefill_vs_train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of this module's runs lie: what one captured, the next takes."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def run(folder: Path) -> Cli:
    require_engine("vllm")
    prompts = write_few_prompts(folder / "few.jsonl")
    inner = command_line(folder)

    def run(*args: object) -> Outcome:
        tokens = () if "--tokens" in args else ("--prompts", prompts, *NEW_TOKENS)
        done = inner(*args, *tokens)
        assert done.code in (0, 1), done.out + done.err
        return done

    return run


def scored(run: Cli, folder: Path, engine: str) -> Path:
    """A capture of the engine on the tokens that HF sampled."""
    source, out = folder / "sampled", folder / engine.replace(":", "-")
    if not source.exists():
        run("capture", "--engine", "hf", "-o", source)
    if not out.exists():
        run("capture", "--engine", engine, "-o", out, "--tokens", source)
    return out


def together(run: Cli, folder: Path, one: str, other: str) -> Outcome:
    pair = [scored(run, folder, engine) for engine in (one, other)]
    # Padding on the other side is a mismatch that the pair is to be measured across.
    across = ("--allow-mismatch", "attributes") if "padding" in other else ()
    done = command_line(folder)("compare", *pair, *EDGE, "--contract", "bitwise", *across)
    assert done.verdict is not None, done.err
    assert done.verdict["coverage"]["unpaired"] == []
    return done


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hf", "fsdp:dp=2"),
        pytest.param("fsdp:dp=1", "fsdp:dp=2", marks=pytest.mark.whole_matrix),
        pytest.param("fsdp:dp=2", "fsdp:dp=2,mixed=0", marks=pytest.mark.whole_matrix),
        ("fsdp:dp=2", "fsdp:dp=2,checkpointing=1"),
        ("megatron:tp=2", "megatron:tp=2,sp=1"),
        ("megatron", "megatron:padding=left"),
    ],
)
def test_bitwise_equal(run: Cli, folder: Path, one: str, other: str) -> None:
    done = together(run, folder, one, other)
    assert done.code == 0, done.out
    assert done.first is None


def test_tensor_parallel_megatron_parts_at_the_first_row_parallel_product(
    run: Cli, folder: Path
) -> None:
    """Column-parallel products and attention are the same sums; o_proj adds two rounded halves."""
    done = together(run, folder, "megatron", "megatron:tp=2")
    assert done.code == 1
    assert done.first == "layers.0.o_proj"
    assert done.verdict["divergence"]["first_bitwise"]["last_equal"] == "layers.0.attn"


def test_vllm_over_two_ranks(run: Cli, folder: Path) -> None:
    """Whose sparse layers are behind a dense one."""
    done = run(
        *("compare", "--rollout", "vllm:tp=2", "--train", "fsdp:dp=2", "--run-dir", folder / "tp"),
        *("--model", SPARSE, *EDGE),
    )
    assert done.verdict["precheck"]["mismatches"] == []
    assert done.verdict["controls"]["observer"] == "bitwise"
    unpaired = done.verdict["coverage"]["unpaired"]
    assert {u["site"].rpartition(".")[2] for u in unpaired} == EXPERTS
    assert done.verdict["coverage"]["paired"] == done.verdict["coverage"]["expected"]
    assert done.first == "layers.0.q_rope"


@pytest.mark.whole_matrix
def test_processed_log_probs_of_vllm_are_named(folder: Path) -> None:
    require_engine("vllm")
    prompts = write_few_prompts(folder / "few.jsonl")
    done = command_line(folder)(
        *("compare", "--rollout", "vllm:temperature=0.7,top_p=0.9,logprobs=processed"),
        *("--train", "hf", "--prompts", prompts, *NEW_TOKENS, *EDGE),
    )
    assert done.code == 4, done.out + done.err
    found = {m["name"]: (m["rollout"], m["train"]) for m in done.verdict["precheck"]["mismatches"]}
    assert found == {
        "temperature": (0.7, 1.0),
        "top_p": (0.9, 1.0),
        "logprobs": ("processed", "raw"),
    }
    # The same temperature on both sides: the sampled log-probs can be compared, and only those.
    matched = command_line(folder)(
        *("compare", "--rollout", "vllm:temperature=0.7,logprobs=processed"),
        *("--train", "hf:temperature=0.7", "--prompts", prompts, *NEW_TOKENS),
        *("--edges", "decode_vs_train"),
    )
    assert matched.code in (0, 1), matched.out + matched.err
    assert matched.verdict["edges"]["decode_vs_train"]["mean_abs_dlogp"] < 0.02
    # Sampling at a temperature is no mismatch where raw log-probs are reported.
    raw = command_line(folder)(
        *("compare", "--rollout", "vllm:temperature=0.7,top_p=0.9", "--train", "hf"),
        *("--prompts", prompts, *NEW_TOKENS),
    )
    assert raw.verdict is not None, raw.err
    assert raw.verdict["precheck"]["mismatches"] == []
    assert raw.verdict["edges"]["decode_vs_train"]["max_abs_dlogp"] < 0.2


def test_the_default_is_vllm_against_megatron(folder: Path) -> None:
    require_engine("vllm")
    require_engine("megatron")
    prompts = write_few_prompts(folder / "few.jsonl")
    done = command_line(folder)(
        "compare", "--prompts", prompts, *NEW_TOKENS, "--run-dir", folder / "run"
    )
    assert done.verdict is not None, done.err
    engines = {role: e["name"] for role, e in done.verdict["engines"].items()}
    assert engines == {"rollout": "vllm", "train": "megatron"}
    assert done.first == "layers.0.attn_norm"

    # By hand, from the same input: vLLM's norm on the CPU rounds and then multiplies by the
    # weight, torch's, which Megatron uses, multiplies in fp32 and rounds once.
    x = values(folder / "run", "rollout", "embed").float()
    config = json.loads((data_path("model") / "config.json").read_text())
    weights = load_file(data_path("model") / "model.safetensors")
    weight = weights["model.layers.0.input_layernorm.weight"]
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
    rounded_first = normed.bfloat16() * weight
    rounded_once = (normed * weight.float()).bfloat16()
    assert torch.equal(values(folder / "run", "rollout", "layers.0.attn_norm"), rounded_first)
    assert torch.equal(values(folder / "run", "train", "layers.0.attn_norm"), rounded_once)
    assert (rounded_first != rounded_once).float().mean() > 0.1
