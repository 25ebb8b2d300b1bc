"""A server that runs compiled code: its log-probs are judged, and each operator is listed as not
seen."""

import json
from pathlib import Path

import pytest
from command import Cli, require_engine, said_by
from served import Server, plugin_folder, wait_for

from rlk_align.data import data_path
from rlk_align.trace.schema import COMPILED

pytestmark = pytest.mark.timeout(1800)
TRAINER = Path(__file__).with_name("trainer_loop.py")
PROMPTS = [list(range(10, 20 + n)) for n in (4, 9, 14)]


def test_log_probs_are_judged_and_operators_are_listed(cli: Cli, tmp_path: Path) -> None:
    require_engine("vllm")
    model, rollout = str(data_path("model")), tmp_path / "rollout"
    environment = {"RLK_RECORD": str(rollout), "RLK_RECORD_WINDOW": "3"}
    server = Server(
        *(model, plugin_folder(tmp_path / "plugin"), tmp_path / "server.log", ()),
        **environment | {"TORCHDYNAMO_DISABLE": "0"},
    )
    try:
        server.wait()
        assert "compiled function" in server.said()
        requests = [
            {"ids": ids, "name": f"r{i}", "max_tokens": 24, "ignore_eos": True}
            for i, ids in enumerate(PROMPTS)
        ]
        answers = server.together(requests)
        wait_for(rollout / "step-00000000/rank-0")
    finally:
        server.close()
    pairs = [(ids, answer["token_ids"]) for ids, answer in zip(PROMPTS, answers, strict=True)]
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps({"0": pairs, "1": pairs}), encoding="utf-8")
    words = [str(TRAINER), str(tmp_path / "train"), model, str(steps), "1"]
    said_by(None, words, {"OMP_NUM_THREADS": "1"}, timeout=580)

    healthy = cli(
        *("compare", rollout, tmp_path / "train/step-00000000", "--run-dir", tmp_path / "healthy")
    )
    assert healthy.code == 2, "a side and a step"
    step = rollout / "step-00000000"
    healthy = cli(
        *("compare", step, tmp_path / "train/step-00000000", "--run-dir", tmp_path / "healthy")
    )
    assert healthy.verdict is not None, healthy.err
    assert healthy.code == 0, healthy.out
    coverage = healthy.verdict["coverage"]
    # Log-probs of 72 sampled tokens on three edges.
    assert (coverage["paired"], coverage["expected"]) == (3 * 72, 3 * 72)
    listed = {each["site"] for each in coverage["unpaired"] if COMPILED in each["reason"]}
    assert {"embed", "layers.0.q_proj", "final_norm", "logits"} <= listed
    assert "logprob" not in listed
    assert "no tap sees a value" in " ".join(healthy.out.split())

    broken = cli(
        *("compare", step, tmp_path / "train/step-00000001", "--run-dir", tmp_path / "broken")
    )
    assert broken.verdict is not None, broken.err
    # The trainer's operators are seen and recomputed, whatever the rollout shows.
    assert broken.code == 1, broken.out
    assert broken.verdict["divergence"]["first_over_budget"]["site"] == "layers.1.up_proj"
    assert broken.verdict["divergence"]["first_over_budget"]["side"] == "train"
