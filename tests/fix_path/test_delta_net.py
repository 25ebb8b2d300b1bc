"""Hybrids in the real vLLM, in transformers and FSDP2: with the kernels a token has the same bits
in decode, in prefill alone, batched and cut at an odd length, after a cached prefix that ends
within a chunk, and in training; without them it has not. `test_pairs.py` has faults."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_equal import assert_equal
from command import Cli, require_engine
from family_models import with_vision
from hybrids import behind_a_cached_prefix, cached_tokens, long_prompts
from pair_models import MODELS

from rlk_align.selftest.faults.catalogue import choose

pytestmark = pytest.mark.whole_matrix
RUN = Path(__file__).with_name("delta_net_run.py")
CUT = {"max_num_batched_tokens": 37, "enable_chunked_prefill": True}
CACHED = {"enable_prefix_caching": True, "block_size": 352}


def model_in(folder: Path) -> Path:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_hidden_layers=4, intermediate_size=256, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 2], max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "conv" not in name:
            scale = 1.0 if "embed" in name else 1.2 / parameter.shape[-1] ** 0.5
            torch.nn.init.normal_(parameter, std=scale)
    model.save_pretrained(folder)
    return folder


def of_vllm(model: Path, out: Path, kernels: str, options: dict, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(RUN), str(model), str(out), kernels, json.dumps(options), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def differing(expected: list[torch.Tensor], actual: list[list[float]]) -> int:
    count, total = 0, 0
    for one, other in zip(expected, actual, strict=True):
        values = torch.tensor(other, dtype=torch.float32)
        assert one.shape == values.shape
        count, total = count + int((one != values).sum()), total + len(values)
    assert total > 40
    return count


def test_a_token_has_the_same_bits_in_every_pass_and_in_transformers(tmp_path: Path) -> None:
    from rlk_kernels.integrations import hf
    from transformers import AutoModelForCausalLM

    model = model_in(tmp_path / "model")
    decoded = of_vllm(model, tmp_path / "decoded.json", "registered", {})
    again = str(tmp_path / "decoded.json")
    passes = {
        "whole": of_vllm(model, tmp_path / "whole.json", "registered", {}, again),
        "cut": of_vllm(model, tmp_path / "cut.json", "registered", CUT, again),
    }
    cached = of_vllm(model, tmp_path / "cached.json", "registered", CACHED)
    off = of_vllm(model, tmp_path / "off.json", "off", {}, again)
    assert cached["cached"][0] == 0
    assert max(cached["cached"]) % 64, "the cached prefix ends within a chunk"

    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    hf.use_kernels(trained)

    def scores(rows: list[list[int]]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [hf.score_tokens(trained, torch.tensor([row]))[0] for row in rows]

    for run in (decoded, cached):
        expected = scores(run["sequences"])
        ends = [row[n - 1 :] for row, n in zip(expected, run["prompts"], strict=True)]
        assert differing(ends, run["sampled"]) == 0
    expected = scores(decoded["sequences"])
    for name, found in passes.items():
        for how in ("scored", "alone"):
            assert differing(expected, found[how]) == 0, (name, how)
    assert differing(expected, off["scored"]) > 0


@pytest.mark.parametrize(
    ("name", "train", "dtype"),
    [
        ("qwen3_5", "fsdp:dp=2", "bfloat16"),
        ("qwen3_5", "fsdp:dp=2", "float32"),
        ("qwen3_next", "fsdp:dp=2", "bfloat16"),
        ("qwen3_next", "hf:batch=4,padding=left", "bfloat16"),
        ("qwen3_next", "hf:batch=4,padding=left", "float32"),
        ("qwen3_5_moe", "hf:batch=4,padding=right", "bfloat16"),
    ],
)
def test_compare_finds_no_bit_where_prompts_are_cut_in_chunks(
    cli: Cli, folder: Path, name: str, train: str, dtype: str
) -> None:
    require_engine("vllm")
    done = cli(
        *("compare", "--model", MODELS[name].stored(folder, name, "bfloat16")),
        *("--prompts", long_prompts(folder, 1), "--max-new-tokens", 12),
        *("--rollout", f"vllm:max_num_batched_tokens=37,max_num_seqs=3,kernels=rlk,dtype={dtype}"),
        *("--train", f"{train},kernels=rlk,dtype={dtype}", "--run-dir", folder / "cut"),
    )
    assert_equal(done, 50, sparse=MODELS[name].sparse)
    assert "no operator beyond its budget on either side" in done.out


@pytest.mark.parametrize("fault", ["conv-late", "delta-loses-token", "gate-before-norm"])
def test_a_fault_of_one_of_two_ranks_is_named(cli: Cli, folder: Path, fault: str) -> None:
    """Ranks share the heads; one has the fault in its own."""
    require_engine("vllm")
    done = cli(
        *("compare", "--model", MODELS["qwen3_next"].stored(folder, "qwen3_next", "bfloat16")),
        *("--prompts", long_prompts(folder, 1), "--max-new-tokens", 12),
        *("--rollout", f"vllm:tp=2,kernels=rlk,fault={fault}@rank1", "--train", "hf:kernels=rlk"),
        *("--run-dir", folder / "rank"),
    )
    assert done.code == 1, done.out + done.err
    site = choose("vllm", fault).fault.site
    over = done.verdict["divergences"]["prefill_vs_train"]["first_over_budget"]
    assert (done.first, over["site"], over["side"]) == (site, site, "rollout")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_without_the_kernels_most_tokens_differ(cli: Cli, folder: Path, name: str) -> None:
    require_engine("vllm")
    done = cli(
        *("compare", "--model", MODELS[name].stored(folder, name, "bfloat16")),
        *("--prompts", long_prompts(folder, 4), "--max-new-tokens", 16, "--kernels", "rlk"),
        *("--rollout", "vllm", "--train", "hf", "--run-dir", folder / "beside"),
    )
    assert_equal(done, 300, sparse=MODELS[name].sparse)
    off = json.loads((folder / "beside" / "kernels-off" / "verdict.json").read_text())
    for edge in off["edges"].values():
        assert edge["bit_mismatches"] > 0.5 * edge["tokens"] > 150


def test_the_decoder_of_a_checkpoint_that_sees_images_has_the_kernels_too(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    require_engine("vllm")
    alone = MODELS["qwen3_5"].stored(folder, "qwen3_5", "bfloat16")
    done = cli(
        *("compare", "--model", with_vision(tmp_path / "model", alone)),
        *("--prompts", long_prompts(folder, 1), "--max-new-tokens", 12),
        *("--rollout", "vllm:kernels=rlk", "--train", "fsdp:dp=2,kernels=rlk"),
        *("--run-dir", folder / "images"),
    )
    assert_equal(done, 50, sparse=False)


@pytest.mark.parametrize(
    ("family", "train"),
    [("qwen3_5_text", "fsdp:dp=2"), ("qwen3_next", "hf:batch=4,padding=left")],
)
def test_compare_finds_no_bit_behind_a_cached_prefix_that_ends_in_a_chunk(
    cli: Cli, folder: Path, family: str, train: str
) -> None:
    rollout = "block_size=96,max_num_seqs=1,kernels=rlk"
    done = behind_a_cached_prefix(cli, folder, family, rollout, f"{train},kernels=rlk")
    assert_equal(done, 40, sparse=family == "qwen3_next")
    assert cached_tokens(folder) == {1: 96, 2: 96, 3: 96}
    assert 96 % 64, "the prefix ends within a chunk"
    # Behind the prefix, the rule is recomputed from the rows of the sample that computed it.
    assert "no operator beyond its budget on either side" in done.out


@pytest.mark.parametrize("kernels", ["rlk", "off"])
def test_a_state_that_is_restored_from_fp8_is_named(cli: Cli, folder: Path, kernels: str) -> None:
    options = "block_size=64,max_num_batched_tokens=64,max_num_seqs=2"
    rollout = f"{options},fault=delta-restored-fp8,kernels={kernels}"
    done = behind_a_cached_prefix(
        *(cli, folder, "qwen3_5_text", rollout, f"hf:kernels={kernels}"),
        *("--edges", "decode_vs_train"),
    )
    assert done.code == 1, done.out + done.err
    assert cached_tokens(folder)
    over = done.verdict["divergences"]["decode_vs_train"]["first_over_budget"]
    assert (over["site"], over["side"]) == ("layers.1.delta", "rollout")
    if kernels == "rlk":
        assert done.first == "layers.1.delta"
