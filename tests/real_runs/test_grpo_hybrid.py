"""The loop of examples/grpo on the embedded hybrid: with the kernels, the trainer has the bits of
the rollout after each update; without them, the loop ends at a weight that vLLM did not update."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import require_engine

pytestmark = pytest.mark.whole_matrix

ROOT = Path(__file__).resolve().parents[2]
WORDS = "--problems 2 --group 4 --max-tokens 24 --seed 3 --device cpu --eval-every 0"


def loop(folder: Path, count: int, kernels: str) -> subprocess.CompletedProcess[str]:
    """A run of `count` steps."""
    require_engine("vllm")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    program = str(ROOT / "examples" / "grpo" / "train.py")
    model = str(ROOT / "fixtures" / "hybrid")
    return subprocess.run(
        [
            *(sys.executable, program, "--run", str(folder), "--model", model, *WORDS.split()),
            *("--steps", str(count), "--kernels", kernels),
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_no_bit_differs_in_any_step(tmp_path: Path) -> None:
    done = loop(tmp_path, 4, "rlk")
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["mismatch"]["tokens"] >= 40
        assert line["mismatch"]["other_bits"] == 0
        assert line["mismatch"]["ratio_max"] == 1.0
        assert line["digests_equal"] == 56
    assert any(line["gradient_norm"] > 0 for line in lines[:-1])


def test_without_the_kernels_a_head_that_is_not_updated_is_named(tmp_path: Path) -> None:
    """vLLM on a CPU computes with a packed copy of the head."""
    done = loop(tmp_path, 1, "off")
    assert done.returncode != 0
    assert "error: stale weights: lm_head of the step before in the rollout" in done.stderr
