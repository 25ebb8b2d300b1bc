"""The real vLLM through the command line."""

import json
from pathlib import Path

import pytest
import torch
from command import (
    Cli,
    Outcome,
    capture_of,
    require_engine,
    values,
    write_prompts_with_a_prefix,
)

from rlk_align.data import data_path
from rlk_align.model.prompts import TokenBatch

PATCHES = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(autouse=True)
def _vllm() -> None:
    require_engine("vllm")


def assert_trustworthy(done: Outcome) -> None:
    assert done.verdict is not None, done.err
    assert done.verdict["precheck"]["mismatches"] == []
    assert done.verdict["controls"]["observer"] == "bitwise"
    assert done.verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
    coverage = done.verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 0
    assert coverage["unpaired"] == []


@pytest.mark.whole_matrix
def test_vllm_against_hf_in_bf16(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lines = sorted(data_path("prompts.jsonl").read_text(encoding="utf-8").splitlines(), key=len)
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("\n".join([*lines[:20], lines[45]]) + "\n", encoding="utf-8")
    done = cli("compare", "--train", "hf", "--run-dir", run, "--prompts", prompts)
    assert_trustworthy(done)
    # A healthy pair: a token or two may pass the tight bound on the maximum, and nothing else.
    assert {b["limit"] for b in done.verdict["breaches"]} <= {"max-dlogp"}, done.out
    assert done.code == (1 if done.verdict["breaches"] else 0)
    assert done.verdict["engines"]["rollout"]["name"] == "vllm"
    assert done.verdict["engines"]["train"]["name"] == "hf"
    edges = done.verdict["edges"]
    assert set(edges) == {"decode_vs_prefill", "prefill_vs_train", "decode_vs_train"}
    assert all(e["tokens"] == done.verdict["tokens"] > 500 for e in edges.values())
    assert done.first == "layers.0.q_rope"
    assert done.verdict["divergence"]["first_bitwise"]["last_equal"] == "layers.0.k_norm"

    # By hand: the same input on both sides; vLLM rotates with cos and sin rounded to bf16 and
    # rounds once, or on some processors cuts the lower bits off; HF rounds cos and sin and then
    # every product and sum.
    before = values(run, "rollout", "layers.0.q_norm")
    assert torch.equal(before, values(run, "train", "layers.0.q_norm"))
    batch = TokenBatch.load(capture_of(run, "rollout").folder / "tokens.parquet")
    position = torch.cat([torch.arange(len(s.ids)) for s in batch.samples])
    config = json.loads((data_path("model") / "config.json").read_text())
    half = config["head_dim"] // 2
    theta = config["rope_parameters"]["rope_theta"]
    frequency = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angle = position[:, None].float() * frequency
    cos, sin = angle.cos().bfloat16()[:, None], angle.sin().bfloat16()[:, None]
    x = before.view(len(before), -1, 2, half)
    x1, x2 = x[:, :, 0], x[:, :, 1]
    hf = torch.stack([x1 * cos + -x2 * sin, x2 * cos + x1 * sin], dim=2).flatten(1)
    c, s, y1, y2 = cos.float(), sin.float(), x1.float(), x2.float()
    rotated = torch.stack([y1 * c - y2 * s, y2 * c + y1 * s], dim=2).flatten(1)
    once, cut = rotated.bfloat16(), (rotated.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(values(run, "train", "layers.0.q_rope"), hf)
    ours = values(run, "rollout", "layers.0.q_rope")
    assert max((ours == x).float().mean() for x in (once, cut.bfloat16())) > 0.999
    assert (ours == hf).float().mean() < 0.95


def test_a_fault_inside_vllm_is_named(cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    healthy = tmp_path / "healthy"
    args = ("--prompts", few_prompts, "--max-new-tokens", 6)
    assert cli("capture", "--engine", "vllm", "-o", healthy, *args).code == 0
    done = cli(
        *("compare", "--model", data_path("model"), *args, "--edges", "prefill_vs_train"),
        *("--rollout", f"replay:path={healthy}"),
        *("--train", "vllm:patch=patches:scale_attention_output"),
        env=PATCHES,
    )
    assert_trustworthy(done)
    assert done.first == "layers.2.attn"
    clean = cli(
        *("compare", "--model", data_path("model"), *args, "--edges", "prefill_vs_train"),
        *("--rollout", f"replay:path={healthy}", "--train", "vllm", "--contract", "bitwise"),
    )
    assert clean.code == 0, clean.out


def test_a_fault_of_vllms_decode_is_named_on_its_edge(cli: Cli, few_prompts: Path) -> None:
    done = cli(
        *("compare", "--prompts", few_prompts, "--max-new-tokens", 6),
        *("--rollout", "vllm:patch=patches:decode_only_in_vllm", "--train", "hf"),
        env=PATCHES,
    )
    assert done.code == 1, done.out + done.err
    divergence = done.verdict["divergence"]
    assert divergence["edge"] == "decode_vs_prefill", done.out
    assert divergence["first_over_budget"]["site"] == "layers.1.o_proj"
    assert "decode differs from prefill in the rollout engine itself" in done.out


def test_chunked_and_packed_rows_find_their_place(cli: Cli, few_prompts: Path) -> None:
    done = cli(
        *("compare", "--prompts", few_prompts, "--max-new-tokens", 6),
        *("--rollout", "vllm:max_num_batched_tokens=16,max_num_seqs=4", "--train", "hf"),
    )
    assert_trustworthy(done)
    assert done.first == "layers.0.q_rope", "a misplaced row would differ at the embedding"


def test_a_patch_takes_effect_or_is_an_error(cli: Cli, few_prompts: Path) -> None:
    """Where vLLM has a kernel for this processor it packs weights away, and a patch changes what
    is no longer computed with; elsewhere the patched weight is in use, and is seen."""
    done = cli(
        *("compare", "--prompts", few_prompts, "--max-new-tokens", 6, "--train", "hf"),
        *("--rollout", "vllm:patch=patches:assign_packed_weight"),
        env=PATCHES,
    )
    if done.code == 2:
        assert "moved this weight into a packed copy" in done.err
    else:
        assert done.code == 4, done.out + done.err
        assert [m["name"] for m in done.verdict["precheck"]["mismatches"]] == ["layers.0.down_proj"]


def test_a_pass_computes_its_own_prefixes(cli: Cli, tmp_path: Path) -> None:
    """Prompts of two blocks of the cache, decoded three times: the repeat finds nothing there."""
    prompts = tmp_path / "long.jsonl"
    lines = [json.dumps({"id": f"p{n}", "ids": [n, *range(6, 70)]}) for n in (4, 5)]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = cli(
        *("compare", "--prompts", prompts, "--max-new-tokens", 16, "--edges", "decode_vs_train"),
        *("--rollout", "vllm:enable_prefix_caching=1,block_size=32", "--train", "hf"),
    )
    assert_trustworthy(done)


CACHED = "vllm:enable_prefix_caching=1,block_size=32,max_num_seqs=1"


def compare_behind_a_prefix(folder: Path) -> tuple[object, ...]:
    """A comparison of prompts that begin alike, without its engines."""
    prompts = write_prompts_with_a_prefix(folder / "shared.jsonl")
    return "compare", "--prompts", prompts, "--max-new-tokens", 16


@pytest.mark.whole_matrix
def test_rows_of_a_cached_prefix_are_not_missing(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        *compare_behind_a_prefix(tmp_path),
        *("--rollout", CACHED, "--train", "hf", "--run-dir", tmp_path / "run"),
    )
    assert_trustworthy(done)
    assert done.code == 0, done.out
    decode = capture_of(tmp_path / "run", "rollout").read_pass("decode").record
    assert decode.cached == {1: 64, 2: 64, 3: 64}
    hidden = len(decode.sites) - len({"logits", "logprob"})
    # On the two edges that have the decode.
    assert done.verdict["coverage"]["served_from_cache"] == 2 * 3 * 64 * hidden
    assert "more served from the cache, not compared" in done.out


@pytest.mark.whole_matrix
def test_a_row_that_taps_lose_is_missing_beside_a_cache(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        *compare_behind_a_prefix(tmp_path),
        *("--rollout", f"{CACHED},patch=patches:drops_a_row", "--train", "hf"),
        *("--edges", "decode_vs_train"),
        env=PATCHES,
    )
    assert done.code == 4
    assert done.verdict["coverage"]["served_from_cache"] > 0
    lost = {"site": "layers.1.up_proj", "reason": "rollout decode lacks 1 rows"}
    assert done.verdict["coverage"]["unpaired"] == [lost]
