"""Real SGLang beside HF: its schedules, temperatures, changes of a live model that the precheck
names, and planted faults. Its pairs are those of `engine_pairs.py`."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import sglang_env
from command import (
    Cli,
    Outcome,
    capture_of,
    require_engine,
    write_few_prompts,
    write_prompts_with_a_prefix,
)
from random_model import write_random_model

pytestmark = [sglang_env.needed, pytest.mark.whole_matrix, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SCHEDULES = "chunked_prefill_size=32,page_size=16,radix_cache=1,max_running_requests=3"


Compared = Callable[..., Outcome]


@pytest.fixture
def compared(cli: Cli, tmp_path: Path) -> Compared:
    """Compares two engines on a few prompts."""

    def run(rollout: str, train: str, *more: object, model: Path | None = None) -> Outcome:
        require_engine(train.partition(":")[0] if "sglang" in rollout else "vllm")
        return cli(
            *("compare", "--rollout", rollout, "--train", train, "--max-new-tokens", 8),
            *("--prompts", write_few_prompts(tmp_path / "few.jsonl")),
            *("--run-dir", tmp_path / "run", *(("--model", model) if model else ()), *more),
            env={"PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))},
        )

    return run


def healthy(done: Outcome) -> dict:
    """The verdict, after what holds for every healthy pair."""
    assert done.code == 0, done.out + done.err
    verdict = done.verdict
    assert verdict is not None
    assert verdict["precheck"]["mismatches"] == verdict["breaches"] == []
    assert verdict["controls"]["observer"] == "bitwise"
    assert set(verdict["controls"]["noise_floor"].values()) == {"bitwise"}
    assert verdict["coverage"]["fraction"] == 1.0
    assert all(edge["tokens"] == verdict["tokens"] > 40 for edge in verdict["edges"].values())
    return verdict


def test_chunks_pages_and_cached_prefixes_change_no_verdict(compared: Compared) -> None:
    chunked = sglang_env.sglang(f"{SCHEDULES},patch=sglang_patches:at_most_32_rows")
    healthy(compared(chunked, "hf"))


def test_rows_of_a_cached_prefix_are_not_missing(compared: Compared, tmp_path: Path) -> None:
    prompts = write_prompts_with_a_prefix(tmp_path / "shared.jsonl")
    rollout = sglang_env.sglang("radix_cache=1,page_size=16,max_running_requests=1")
    verdict = healthy(compared(rollout, "hf", "--prompts", prompts, "--max-new-tokens", 16))
    for name in ("decode", "prefill"):
        cached = capture_of(tmp_path / "run", "rollout").read_pass(name).record.cached
        assert cached == {1: 64, 2: 64, 3: 64}, name
    assert verdict["coverage"]["served_from_cache"] > 0


def test_without_chunks_a_forward_has_more_rows(compared: Compared) -> None:
    done = compared(sglang_env.sglang("patch=sglang_patches:at_most_32_rows"), "hf")
    assert done.code == 3
    assert "AssertionError" in done.err


def test_a_family_of_which_no_kernel_runs(compared: Compared, tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", model_type="mistral", dtype="bfloat16")
    healthy(compared(sglang_env.sglang(), "hf", model=model))


def test_processed_log_probs_have_the_temperature(compared: Compared) -> None:
    rollout = sglang_env.sglang("temperature=0.7,logprobs=processed")
    verdict = healthy(compared(rollout, "hf:temperature=0.7", "--edges", "decode_vs_train"))
    assert verdict["edges"]["decode_vs_train"]["max_abs_dlogp"] < 0.1
    done = compared(rollout, "hf")
    assert done.code == 4
    assert "temperature" in str(done.verdict["precheck"]["mismatches"])


@pytest.mark.parametrize(
    ("patch", "named"),
    [("louder_value", "layers.2.v_proj"), ("narrower_attention", "attention_scale")],
)
def test_a_changed_live_model_is_named_by_the_precheck(
    compared: Compared, patch: str, named: str
) -> None:
    done = compared(sglang_env.sglang(f"patch=sglang_patches:{patch}"), "hf")
    assert done.code == 4, done.out + done.err
    assert named in str(done.verdict["precheck"]["mismatches"])


FAULTS = {
    "": (
        *("norm-eps", "rope-query-channel", "act-gelu", "kv-stale", "decode-gain"),
        *("logprob-temperature", "copy-stale-head", "copy-stale-linear"),
    ),
    # The sums over the ranks are outside of SGLang's modules.
    "tp=2": (
        *("proj-gain", "proj-accumulation", "residual-branch", "attn-scale", "norm-channel"),
        *("embed-scaled", "logits-fp8", "weight-norm", "copy-stale-head", "copy-stale-linear"),
    ),
}
"""Options -> the faults that are planted into SGLang with them, and into HF."""
ROLLOUT_ONLY = {"kv-stale", "decode-gain", "copy-stale-head", "copy-stale-linear"}


@pytest.mark.parametrize("options", FAULTS)
def test_planted_faults_are_named_on_either_side(cli: Cli, tmp_path: Path, options: str) -> None:
    faults = FAULTS[options]
    done = cli(
        *("selftest", "--engines", f"{sglang_env.sglang(options)},hf", "--seeds", 0, "--no-curves"),
        *("--faults", ",".join(faults), "--run-dir", tmp_path / "run"),
    )
    assert done.code == 0, done.out + done.err
    results = (tmp_path / "run/selftest.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(results) == 2 * len(faults) - len(ROLLOUT_ONLY.intersection(faults))
