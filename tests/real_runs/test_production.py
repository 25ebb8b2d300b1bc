"""vLLM's compiled mode through the command line, on a CPU, where it has no CUDA graphs."""

from pathlib import Path

import pytest
from command import Cli, capture_of, require_engine

from rlk_align.trace.records import load_record
from rlk_align.trace.schema import PassRecord


@pytest.mark.parametrize("kernels", ["off", pytest.param("rlk", marks=pytest.mark.whole_matrix)])
def test_production_decodes_and_scores(
    cli: Cli, few_prompts: Path, tmp_path: Path, kernels: str
) -> None:
    require_engine("vllm")
    done = cli(
        *("compare", "--rollout", f"vllm:kernels={kernels}", "--train", f"hf:kernels={kernels}"),
        *("--prompts", few_prompts, "--max-new-tokens", 12, "--production"),
        *("--run-dir", tmp_path / "run"),
        shared=False,
    )
    production = done.verdict["controls"]["production"]
    assert list(production) == ["decode", "prefill"]
    for name, found in production.items():
        assert found["cuda_graph_replays"] == 0
        assert found["graphs"] is None
        tokens = found["metrics"]["tokens"]
        assert found["expected"] == done.verdict["tokens"] >= tokens > 0
        if kernels == "rlk":
            assert tokens == found["expected"]
            assert found["metrics"]["bit_mismatches"] == 0
            assert found["parted"] == []
        # Compiled code may sample another token than the observed text has.
        parted = f", {len(found['parted'])} sample" if found["parted"] else "; without"
        assert f"{name}: {tokens} of {found['expected']} tokens compared{parted}" in done.out
    both = sum(found["metrics"]["tokens"] for found in production.values())
    assert done.verdict["edges"]["production_vs_observed"]["tokens"] == both
    # A compiler that took seconds at the first forward is not in the pass's time.
    folder = capture_of(tmp_path / "run", "rollout").folder
    record = load_record(PassRecord, folder / "prefill.production/pass.json")
    assert record.graphs is None
    assert record.seconds < 2
