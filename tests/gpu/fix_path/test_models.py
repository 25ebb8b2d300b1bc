"""On a GPU, small models of several families with the kernels: vLLM's decode and prefill, compiled
with CUDA graphs too, and HF give the same bits at every site, and send every token to the same
experts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import COMMON, MODELS, write_model
from modes import ROOT, environment, runs

pytestmark = pytest.mark.skipif(not runs(), reason="needs vLLM and an NVIDIA GPU")


SPARSE_LAYERS = {"glm4_moe": 3, "gpt_oss": COMMON["num_hidden_layers"], "qwen3_next": 3}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


def compared(
    folder: Path, model: str, rollout: str, train: str, *more: str
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the verdict, and what was said of vLLM against HF."""
    prompts = (ROOT / "fixtures/prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(prompts[:24]))
    command = [
        *(sys.executable, "-m", "rlk_align", "compare", "--model", model),
        *("--rollout", f"vllm:kv_cache_gb=4,{rollout}", "--train", f"hf:{train}"),
        *("--contract", "bitwise"),
        *("--prompts", str(folder / "few.jsonl"), "--max-new-tokens", "16"),
        *("--run-dir", str(folder / "run"), "--output", f"json={folder / 'verdict.json'}", *more),
    ]
    done = subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=550
    )
    said = (done.stdout + done.stderr)[-6000:]
    assert (folder / "verdict.json").exists(), said
    return done.returncode, json.loads((folder / "verdict.json").read_text()), said


def test_no_bit_differs(tmp_path: Path, model: str) -> None:
    code, verdict, said = compared(tmp_path, model, "kernels=rlk", "kernels=rlk", "--production")
    assert code == 0, said
    edges = verdict["edges"]
    assert set(edges) == {
        "decode_vs_prefill", "prefill_vs_train", "decode_vs_train", "production_vs_observed"
    }  # fmt: skip
    for name, edge in edges.items():
        passes = 2 if name == "production_vs_observed" else 1
        assert edge["tokens"] == passes * verdict["tokens"] > 200, name
        assert edge["bit_mismatches"] == 0, name
    assert set(verdict["controls"]["production"]) == {"decode", "prefill"}
    for name, found in verdict["controls"]["production"].items():
        assert found["metrics"]["tokens"] == found["expected"] == verdict["tokens"], name
        assert found["parted"] == [], name
        assert found["cuda_graph_replays"] > 0, name
        # A decode's first steps compute whole prompts; a prefill's are cut to the graphs' size.
        assert name == "decode" or found["graphs"]["replayed_steps"] == found["graphs"]["steps"]
    assert verdict["coverage"]["paired"] == verdict["coverage"]["expected"] > 50_000
    assert verdict["coverage"]["unpaired"] == []
    config = json.loads((Path(model) / "config.json").read_text())
    sparse = SPARSE_LAYERS.get(config["model_type"], 0)
    for name, routing in verdict["routing"].items() if sparse else ():
        assert len(routing["layers"]) == sparse, name
        assert routing["tokens"] > 500, name
        assert routing["flipped_tokens"] == 0, name


# The tool refuses vLLM's own gated delta nets on a GPU.
@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"qwen3_next"}), indirect=True)
def test_without_the_kernels_there_is_drift(tmp_path: Path, model: str) -> None:
    """The control group: the same command."""
    # sdpa ignores a cap and sinks.
    code, verdict, said = compared(tmp_path, model, "kernels=off", "attn=eager", "--no-production")
    assert code != 0, said
    assert verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 100
