"""On a GPU, the kernels' sampler in the real vLLM: a request draws the same tokens with the same
log-probs, whatever runs beside it and however its step is launched; one whose logits have no
distribution is named."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from modes import ROOT, environment, runs

pytestmark = pytest.mark.skipif(not runs(), reason="needs vLLM and an NVIDIA GPU")

SCRIPT = ROOT / "tests" / "fix_path" / "vllm_draws.py"
POISON = 999
CASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"options": {"enforce_eager": False}},
    "reversed, seven, chunks of 40": {
        "options": {"max_num_seqs": 7, "max_num_batched_tokens": 40}, "order": "reversed",
    },
    "alone": {"alone": True},
    "too few blocks": {
        "options": {"num_gpu_blocks_override": 64, "block_size": 16, "disable_log_stats": False},
    },
    "vLLM's own": {"sampler": False},
    "poisoned": {"poison": POISON},
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    from rlk_align.data import data_path

    folder, made = tmp_path_factory.mktemp("draws"), random.Random(0)
    prompts = [[made.randrange(2, POISON) for _ in range(20 + n)] for n in range(64)]
    common = {"model": str(data_path("model")), "prompts": prompts, "new_tokens": 12}
    cases = [{"name": name} | common | case for name, case in CASES.items()]
    for case in cases:
        case["options"] = {"gpu_memory_utilization": 0.01} | case.get("options", {})
        if "order" in case:
            case["order"] = [*range(64)][::-1]
        if case["name"] == "poisoned":
            case["prompts"] = [*prompts[:3], [5, POISON], *prompts[4:]]
    (folder / "cases.json").write_text(json.dumps(cases))
    words = [str(SCRIPT), str(folder / "cases.json"), str(folder / "found.json")]
    done = subprocess.run([sys.executable, *words], env=environment(), capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", [*CASES][1:5])
def test_a_request_draws_the_same_tokens(found: dict[str, Any], name: str) -> None:
    first = found["eager"]
    assert len(first["tokens"]) == 64
    assert len({tuple(tokens) for tokens in first["tokens"]}) > 32
    for what in ("tokens", "logprobs"):
        assert found[name][what] == first[what]
    assert "sample" in found[name]["ran"]
    assert bool(found[name]["preempted"]) == (name == "too few blocks")


def test_vllms_own_sampler_draws_others(found: dict[str, Any]) -> None:
    """The control: these requests tell."""
    assert "sample" not in found["vLLM's own"]["ran"]
    assert found["vLLM's own"]["tokens"] != found["eager"]["tokens"]


def test_a_request_without_a_distribution_is_named(found: dict[str, Any]) -> None:
    assert found["poisoned"]["error"].startswith("the logits of request 3")
