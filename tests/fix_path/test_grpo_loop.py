"""The loop of examples/grpo: no token differs in any step, a step repeats bit for bit for any
batches of its rollout, and the loop's checks name their faults."""

import json
import math
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import require_engine, said_by

ROOT = Path(__file__).resolve().parents[2]


def results_of(script: str, folder: Path) -> Any:
    """What a script beside this file writes, in a separate process."""
    require_engine("vllm")
    answers = folder / "found.json"
    words = [str(Path(__file__).with_name(script)), str(folder / "run"), str(answers)]
    path = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "examples/grpo"))
    said_by("vllm", words, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=500)
    return json.loads(answers.read_text(encoding="utf-8")) | {"run": folder / "run"}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results_of("grpo_loop.py", tmp_path_factory.mktemp("grpo"))


def test_no_token_has_another_bit_in_any_step(loop: Any) -> None:
    lines = [step["metrics"] for step in loop["once"]]
    for line in lines:
        drift = line["mismatch"]
        assert drift["tokens"] >= 10
        assert drift["other_bits"] == 0
        assert drift["max"] == drift["k3"] == 0.0
        assert drift["ratio_max"] == 1.0
        assert line["digests_equal"] > 40
        assert line["gradient_norm"] > 0
        assert line["clip_fraction"] == 0.0
    # The weights changed in between.
    assert loop["once"][0]["bits"][0] != loop["once"][1]["bits"][0]


def test_a_resumed_run_has_the_bits_of_one_that_went_on(loop: Any) -> None:
    """Its rollout also had other batches."""
    assert loop["resumed, cut otherwise"] == loop["once"][1]["bits"]
    assert len(loop["resumed, cut otherwise"]) == 2


def test_a_run_at_its_end_is_not_a_failure_to_resume(loop: Any) -> None:
    assert loop["resumed at its end"] == {"code": 0, "bits": loop["once"][1]["bits"]}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("shift", "mask shifted by +1: in sample 0, at token "),
        ("shift back", "mask shifted by -1: in sample 0, at token "),
        ("prompt", "prompt token counted: in sample 0, at token "),
        ("tool", "tool's token counted: in sample "),
        ("left out", "sampled token left out: in sample 0, at token "),
        ("cut", "cut answer counted: sample 0 ends at the token limit"),
        ("another", "lists of other lengths: sample 0 has "),
        ("no log-prob", "log-prob of another token: in sample 0, at token "),
        ("late log-probs", "log-prob of another token: in sample 0, at token "),
    ],
)
def test_a_wrong_mask_is_named(loop: Any, fault: str, name: str) -> None:
    assert max(loop["tries"]) > 1
    assert all(loop["cut"])
    assert loop["masks"][fault].startswith(name)


def test_gspo_clips_the_sequence_that_the_trainer_computes_otherwise(loop: Any) -> None:
    found = loop["gspo"]
    first, *others = found["tokens"]
    assert min(first, *others) > 3
    assert found["clipped"] == [0.0, pytest.approx(first / (first + sum(others)))]
    assert set(found["gradients"][0]) == {0.0}
    for tokens, gradient in zip(others, found["gradients"][1:], strict=True):
        assert gradient == pytest.approx([-0.5 / tokens] * tokens)
    assert found["not counted"] == 0


def test_a_layer_that_was_not_synced_is_named(loop: Any) -> None:
    stale = loop["stale"]
    assert stale.startswith("stale weights: layers.2.")
    assert "layers.2.down_proj" in stale
    assert "layers.1" not in stale


def test_a_trainer_that_computes_otherwise_is_seen(loop: Any) -> None:
    assert loop["drift"]["other_bits"] > 0
    assert loop["drift"]["max"] > 0


def test_a_gradient_that_is_not_finite_ends_the_run(loop: Any) -> None:
    seen = loop["not finite"]
    assert seen["fault"].startswith("gradient not finite: norm nan, in 1 of ")
    assert seen["parameter"] in seen["fault"]
    assert seen["unchanged"]


def test_a_summary_shows_what_is_not_a_number(loop: Any, tmp_path: Path) -> None:
    steps = [step["metrics"] for step in loop["once"]]
    steps.append(steps[0] | {"mismatch": steps[0]["mismatch"] | {"max": float("nan")}})
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    words = [sys.executable, str(ROOT / "examples/grpo/summary.py"), str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "| nan |" in said
    assert "| 0.000 (0.000 to 0.000) |" in said  # clipped


def test_the_log_probs_are_read_by_the_tool(loop: Any) -> None:
    from rlk_align.logs.dumps.record import SequenceRecord

    lines = [
        SequenceRecord.model_validate_json(line)
        for path in sorted((loop["run"] / "log-probs").glob("step_00000[01]_*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert len(lines) == 16
    assert all(line.rollout_logprobs == line.train_logprobs for line in lines)


@pytest.mark.whole_matrix
def test_a_temperature_and_a_limit_move_no_bit(tmp_path: Path) -> None:
    """The trainer's log-probs and gradients are those among the tokens that the sampler keeps."""
    found = results_of("grpo_limits.py", tmp_path)
    for line in found["steps"]:
        drift = line["mismatch"]
        assert drift["tokens"] > 80
        assert drift["other_bits"] == drift["dropped"] == 0
        assert drift["max"] == drift["k3"] == 0.0
        assert line["gradient_norm"] > 0
        assert line["entropy"] is None
    assert found["cut otherwise"] == found["digests"][0] != found["digests"][1]
    assert found["weights changed"] > 20
    assert found["distances"]["kept"] < 1e-3 < 1e-2 < found["distances"]["all"]
    faults = found["faults"]
    for drift in faults.values():
        assert drift["tokens"] == found["steps"][0]["mismatch"]["tokens"]
        assert drift["other_bits"] > 10
        assert math.isfinite(drift["gradient"])
    assert [drift["dropped"] > 0 for drift in faults.values()] == [False, True, False]
    assert faults["narrower"]["max"] == math.inf
    (path, _) = sorted((tmp_path / "run" / "log-probs").glob("*.jsonl"))
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        said = {"temperature": 0.7, "top_p": 0.9, "logprobs_mode": "processed_logprobs"}
        assert (record["sampling"], record["sampler"]) == (said, "rlk")
        drawn = [seed is not None for seed in record["seeds"]]
        assert drawn == [value is not None for value in record["rollout_logprobs"]]


def test_problems_are_of_the_chosen_families_and_not_held_out() -> None:
    made = runpy.run_path(str(ROOT / "examples/grpo/problems.py"))
    kept_back = made["held_out"](64, ("multiply",))
    asked = made["training"](0, 3, 400, 64, ("multiply",))
    drawn = [made["draw"](random.Random(n), ("multiply",)) for n in range(400)]
    assert {problem.family for problem in (*kept_back, *asked)} == {"multiply"}
    assert not {problem.prompt for problem in kept_back} & {problem.prompt for problem in asked}
    # A quarter of the tokens that are drawn would be.
    assert sum(problem in kept_back for problem in drawn) > 50
