"""TRL's own loop, with vLLM in its process: what its metrics say of the kernels on both sides."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parents[2]
DIFFERENCE = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio"


def loop(mode: str, folder: Path, ranks: int = 1) -> list[dict[str, Any]]:
    """What each rank says of the loop."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else ()), ROOT / "tests/support/trl_loop.py", mode,
         folder / "loop"],
        cwd=ROOT, check=True, timeout=600,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )  # fmt: skip
    files = [folder / f"loop.{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def metrics(run: dict[str, Any], name: str) -> list[float]:
    return [step[name] for step in run["steps"] if name in step]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.whole_matrix)])
def test_both_sides_have_the_same_bits(tmp_path: Path, ranks: int) -> None:
    for run in loop("both", tmp_path, ranks):
        assert run["error"] is None
        assert run["changed"] == run["parameters"] == 46
        assert metrics(run, f"{DIFFERENCE}/max") == metrics(run, f"{DIFFERENCE}/mean") == [0.0, 0.0]
        for which in ("min", "mean", "max"):
            assert metrics(run, f"{RATIO}/{which}") == [1.0, 1.0]
        assert all(norm > 0 for norm in metrics(run, "grad_norm"))


@pytest.mark.whole_matrix
def test_in_the_rollout_alone_the_two_sides_drift(tmp_path: Path) -> None:
    (run,) = loop("rollout", tmp_path)
    largest = metrics(run, f"{DIFFERENCE}/max")
    assert len(largest) == 2
    assert min(largest) > 1e-3


def test_an_operator_that_the_trainer_computes_itself_is_named(tmp_path: Path) -> None:
    (run,) = loop("act", tmp_path)
    assert "still computes layers.0.act, layers.1.act" in run["error"]
    assert run["largest"][0] > 1e-3


@pytest.mark.whole_matrix
def test_a_weight_that_does_not_reach_vllm_is_named(tmp_path: Path) -> None:
    (run,) = loop("stale", tmp_path)
    assert run["error"] == (
        "after synchronisation 2, vLLM does not hold the trainer's weights: "
        "model.layers.1.mlp.down_proj.weight: 192 of 192 rows differ"
    )
    assert metrics(run, f"{DIFFERENCE}/max") == [0.0]
