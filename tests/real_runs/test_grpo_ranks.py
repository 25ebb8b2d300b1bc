"""The loop of examples/grpo on two ranks: FSDP2, a vLLM each, the bits of the rollout on both."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from command import require_engine

pytestmark = pytest.mark.whole_matrix

ROOT = Path(__file__).resolve().parents[2]
GROUP, STATE = 4, "state.safetensors"
WORDS = f"--problems 4 --group {GROUP} --max-tokens 24 --pack-tokens 150 --seed 3 --device cpu"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two ranks, and a third one by a process that resumed."""
    require_engine("vllm")
    folder = tmp_path_factory.mktemp("ranks") / "run"
    for how in ("--steps 2", "--steps 3 --resume"):
        done = start(folder, how)
        assert done.returncode == 0, done.stderr[-3000:]
        state = folder / "rank-1" / STATE
        shutil.copy(state, folder / f"{STATE} of rank 1, {how}")
    return folder


def start(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", "2", "--", str(ROOT / "examples" / "grpo" / "train.py")]
    words = ["--run", str(folder), *WORDS.split(), *how.split()]
    return subprocess.run(
        [*launcher, *program, *words], env=variables, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def metrics(run: Path, rank: int) -> list[dict[str, Any]]:
    text = (run / f"rank-{rank}" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_no_rank_has_another_bit_in_any_step(run: Path) -> None:
    both = [metrics(run, rank) for rank in range(2)]
    for lines in both:
        assert [line["step"] for line in lines] == [0, 1, 2]
        for line in lines:
            assert line["mismatch"]["tokens"] >= 10
            assert line["mismatch"]["other_bits"] == 0
            assert line["mismatch"]["ratio_max"] == 1.0
            assert line["digests_equal"] > 40
    # One gradient, of other answers.
    assert [x["gradient_norm"] for x in both[0]] == [x["gradient_norm"] for x in both[1]]
    assert both[0][0]["mismatch"]["tokens"] != both[1][0]["mismatch"]["tokens"]


def test_the_gradient_is_that_of_all_answers(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One process makes it from what both ranks wrote."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    from batch import Sample, packs
    from options import arguments
    from ranks import Ranks
    from rlk_kernels import group_advantages
    from trainer import Trainer

    files = sorted((run / "log-probs").glob("step_000000_rank_*_of_2.jsonl"))
    lines = [json.loads(x) for path in files for x in path.read_text().splitlines()]
    assert len(files) == 2
    advantages = group_advantages(torch.tensor([x["reward"] for x in lines]), GROUP).tolist()
    assert any(advantages)
    samples = [
        Sample(x["token_ids"], x["prompt_length"], x["mask"], x["rollout_logprobs"], a)
        for x, a in zip(lines, advantages, strict=True)
    ]
    options = arguments(["--run", str(tmp_path), *WORDS.split()])
    device = torch.device("cpu")
    trainer = Trainer(options, Ranks(device), lambda _stage: nullcontext())
    _, norm = trainer.update(list(packs(samples, options.pack_tokens, device)))
    assert norm == pytest.approx(metrics(run, 0)[0]["gradient_norm"], rel=0.01)


def test_states_of_different_steps_are_not_trained_on(run: Path, tmp_path: Path) -> None:
    """A run that was killed after one rank had saved, and the other had not."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.copy(run / f"{STATE} of rank 1, --steps 2", folder / "rank-1" / STATE)
    done = start(folder, "--steps 4 --resume")
    assert done.returncode != 0
    assert "error: " in done.stderr
    assert "of step 3 in one rank, and of step 2 in another" in done.stderr
    assert not list(folder.glob("log-probs/step_000003*"))
