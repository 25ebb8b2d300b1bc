"""Two engines with the kernels on one model, for the pairs of `engine_pairs.py`: no bit differs, at
any site of any row, and every token goes to the same experts. Without the kernels:
`tests/real_runs/test_healthy_pairs.py`."""

import shutil
from pathlib import Path

import pytest
import torch
from bit_equal import assert_equal
from command import Cli, require_engine, write_few_prompts, write_prompts_that_begin_alike
from engine_pairs import CACHED, DEFAULT, WHOLE, cases
from family_models import with_vision
from pair_models import MODELS
from safetensors.torch import load_file, save_file

from rlk_align.model.edges import EDGES
from rlk_align.selftest.faults.catalogue import choose


@pytest.mark.parametrize("name", cases("rlk"))
def test_no_bit_differs(cli: Cli, folder: Path, name: str) -> None:
    pair = WHOLE[name]
    assert_equal(pair.compared(cli, folder), 40, sparse=MODELS[pair.model].sparse)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", CACHED)
def test_no_bit_differs_behind_a_cached_prefix(cli: Cli, folder: Path, name: str) -> None:
    """The rows that SGLang takes from its cache are counted apart; every log-prob is compared.
    Without the kernels, they differ."""
    pair = CACHED[name]
    done = pair.run(cli, folder, write_prompts_that_begin_alike(folder / "alike.jsonl"))
    assert done.code == 0, done.out + done.err
    verdict = done.verdict
    assert verdict is not None
    coverage = verdict["coverage"]
    assert coverage["served_from_cache"] > 0
    assert coverage["paired"] == coverage["expected"] > 0
    edges = verdict["edges"].values()
    assert len(edges) == len(EDGES)
    assert all(edge["tokens"] == verdict["tokens"] > 40 for edge in edges)
    if pair.kernels == "rlk":
        assert done.first is None
        assert all(edge["bit_mismatches"] == 0 for edge in edges)
    else:
        assert all(edge["bit_mismatches"] > 0 for edge in edges)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        # The rows of one operator in a product of several, and a rotation of a part of each head.
        *(("phi3", fault) for fault in ("proj-weight-fp8", "proj-noise", "rope-partial")),
        ("ernie4_5", "rope-interleaved"),
        ("granite", "residual-multiplier-left-out"),
        ("glm4", "post-norm-left-out"),
        ("olmo3", "norm-each-head"),
        ("exaone4", "attn-rotated"),
        ("seed_oss", "proj-gain"),
        *(("gated", fault) for fault in ("shared-gate-left-out", "expert-flipped")),
        *(("gemma3", fault) for fault in ("norm-one-left-out", "embed-scaled")),
        *(("gpt_oss", fault) for fault in ("attn-sinks-left-out", "router-bias-dropped")),
        ("ministral3", "attn-scale"),
        ("ernie4_5_moe", "expert-flipped"),
        *(("minimax_m2", fault) for fault in ("norm-each-head", "rope-partial", "expert-flipped")),
        ("glm", "rope-interleaved"),
        ("arcee", "proj-channel-shift"),
        ("hunyuan", "norm-before-rotation"),
        ("starcoder2", "norm-bias-dropped"),
        ("cohere2", "norm-mean-kept"),
        # A state and a convolution that are not reset, a token that is lost, and rounded decays.
        *(("qwen3_next", fault) for fault in ("delta-not-reset", "conv-late", "gate-before-norm")),
        *(("qwen3_5", fault) for fault in ("delta-loses-token", "delta-decay-bf16")),
    ],
)
def test_a_fault_beside_the_kernels_of_a_variant_is_named(
    cli: Cli, folder: Path, engine: str, name: str, fault: str
) -> None:
    assert first_difference(cli, folder, name, engine, f"fault={fault}") == (
        choose(engine, fault).fault.site
    )


@pytest.mark.whole_matrix
@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("name", "op"),
    [
        *(("gemma3", op) for op in ("attn_post_norm", "act")),
        ("exaone4", "mlp_post_norm"),
        ("granite", "logits"),
        ("smollm3", "q_rope"),
        ("glm", "act"),
        ("starcoder2", "down_proj"),
        *(("qwen3_5", op) for op in ("mlp_norm", "act")),
    ],
)
def test_an_operator_of_a_variant_that_the_engine_keeps_is_named(
    cli: Cli, folder: Path, engine: str, name: str, op: str
) -> None:
    site = first_difference(cli, folder, name, engine, f"except={op}")
    assert str(site).rpartition(".")[2] == op


@pytest.mark.whole_matrix
def test_a_family_that_vllm_computes_with_the_kernels_only(cli: Cli, folder: Path) -> None:
    """The corrections of its checkpoint are in fp32, and differ by less than roundings to bf16, in
    which transformers loads them: with their own values, vLLM would choose other experts."""
    require_engine("vllm")
    model = folder / "corrections-in-fp32"
    if not model.exists():
        shutil.copytree(MODELS["minimax_m2"].stored(folder, "minimax_m2", "bfloat16"), model)
        for file in model.glob("*.safetensors"):
            tensors = load_file(file)
            for name in (n for n in tensors if n.endswith("e_score_correction_bias")):
                tensors[name] = 64 + torch.linspace(-0.1, 0.1, len(tensors[name]))
            save_file(tensors, file, metadata={"format": "pt"})
    done = cli(
        *("compare", "--model", model, "--prompts", write_few_prompts(folder / "few.jsonl")),
        *("--max-new-tokens", 8, "--rollout", "vllm", "--train", "hf", "--kernels", "rlk"),
        *("--contract", "bitwise", "--run-dir", folder / "with-kernels-only"),
    )
    assert_equal(done, 40, sparse=True)
    assert "nothing is compared without the kernels: vllm does not support" in done.err
    assert not (folder / "with-kernels-only" / "kernels-off").exists()


@pytest.mark.whole_matrix
@pytest.mark.parametrize(
    ("name", "train", "start"),
    [
        ("gemma3", "hf:batch=4,padding=left", ""),
        ("mistral", "fsdp:dp=2", ""),
        ("ministral3", "hf", "model."),
    ],
)
def test_the_decoder_of_a_checkpoint_that_sees_images_has_the_kernels(
    cli: Cli, folder: Path, tmp_path: Path, name: str, train: str, start: str
) -> None:
    require_engine("vllm")
    alone = MODELS[name].stored(folder, name, "bfloat16")
    done = cli(
        *("compare", "--model", with_vision(tmp_path / "model", alone, start)),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 8),
        *("--rollout", "vllm", "--train", train, "--kernels", "rlk"),
        *("--contract", "bitwise", "--run-dir", tmp_path / "run"),
    )
    assert_equal(done, 40)


def first_difference(cli: Cli, folder: Path, name: str, engine: str, change: str) -> str | None:
    """The first site that differs between vLLM and HF with the kernels, one of them changed."""
    require_engine("vllm")
    specs = {each: f"{each}:kernels=rlk" for each in ("vllm", "hf")}
    specs[engine] += f",{change}"
    done = cli(
        *("compare", "--model", MODELS[name].stored(folder, name, "bfloat16")),
        *("--prompts", write_few_prompts(folder / "few.jsonl"), "--max-new-tokens", 8),
        *("--rollout", specs["vllm"], "--train", specs["hf"], "--contract", "bitwise"),
        *("--run-dir", folder / "changed"),
    )
    assert done.code == 1, done.out + done.err
    return done.first


def test_the_default_pairs_cover_every_two_values() -> None:
    """The axes of `Pair.goals`; the whole matrix is far larger."""
    default = [WHOLE[name] for name in DEFAULT]
    reached = frozenset().union(*(pair.goals for pair in default))
    for name, pair in WHOLE.items():
        assert pair.goals <= reached, name
    every = {name for name, model in MODELS.items() if not (model.as_in or model.rarely)}
    assert {pair.model for pair in default} >= every
    assert {model.as_in for model in MODELS.values()} <= {"", *MODELS}
    assert len(default) < len(WHOLE) / 15
