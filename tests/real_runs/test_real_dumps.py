"""Real runs of vLLM and a trainer on the embedded model: each fault is named, the healthy run is
not. Engines run in processes of their own, as `scripts/real_dumps.py` starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole_matrix
ROOT = Path(__file__).resolve().parents[2]
DIAGNOSES = {
    "healthy": "numerics",
    "temperature-of-trainer": "temperature",
    "temperature-of-rollout": "temperature",
    "mask": "mask-shifted",
    "top-p": "truncation",
    "stale-cache": "stale-cache",
    "stale-weights": "stale-weights",
    "lora": "stale-weights",
}


def script(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / name), *map(str, args)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("dumps")
    done = script("real_dumps.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", DIAGNOSES)
def test_a_real_fault_is_named(name: str, dumps: Path, cli) -> None:
    run, verdict = dumps / f"{name}.run", dumps / f"{name}.json"
    assert cli("import", "jsonl", dumps / f"{name}.jsonl", "-o", run).code == 0
    explained = cli("explain", run, "--output", f"json={verdict}")
    assert explained.code == (0 if name == "healthy" else 1), explained.err
    assert json.loads(verdict.read_text())["diagnoses"][0]["name"] == DIAGNOSES[name]


def test_a_live_run_is_stopped_once_its_weights_are_not_synced(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    arguments = ("--steps", 20, "--sync-until", 10, "--stop-early")
    done = script("monitor_live.py", tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert last in {f"stopped at step {step}" for step in range(11, 16)}, done.stdout
