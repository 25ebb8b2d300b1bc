"""Requests that vLLM preempts, computes in chunks, or finds in its cache are recorded as such, and
a wrong position of a preempted one is named."""

import json
from pathlib import Path

import pytest
from command import Cli, Outcome, require_engine, said_by
from served import Server, plugin_folder, wait_for

from rlk_align.data import data_path
from rlk_align.record.shared.layout import RECORDING, RecordingRecord
from rlk_align.trace.records import load_record

pytestmark = pytest.mark.timeout(1800)
TRAINER = Path(__file__).with_name("trainer_loop.py")
STEP = "step-00000000/rank-0"
PREFIX = list(range(10, 60))
PROMPTS = [[*PREFIX, *range(60, 60 + n)] for n in (4, 9, 14, 19)]
SMALL = (
    *("--enforce-eager", "--enable-prefix-caching", "--block-size", "32"),
    # Room for 18 blocks, of which three requests need 8 each.
    *("--max-model-len", "320", "--num-gpu-blocks-override", "19"),
    *("--max-num-batched-tokens", "48", "--max-num-seqs", "4"),
)


def recorded(folder: Path, *faults: str) -> RecordingRecord:
    """Serves four requests with too small a cache, and records a trainer that scores them."""
    model = str(data_path("model"))
    plugin = plugin_folder(folder / "plugin", *faults)
    environment = {"RLK_RECORD": str(folder / "rollout"), "RLK_RECORD_WINDOW": "5"}
    server = Server(model, plugin, folder / "server.log", SMALL, **environment)
    try:
        server.wait()
        first = {"ids": PROMPTS[0], "name": "first", "max_tokens": 1, "ignore_eos": True}
        wanted = [
            {"ids": ids, "name": f"r{i}", "max_tokens": 180, "ignore_eos": True}
            for i, ids in enumerate(PROMPTS[1:])
        ]
        # The first one leaves its keys and values in the cache.
        answers = server.together([first]) + server.together(wanted)
        # The step lacks its fifth request, and ends because weights may change after a pause.
        assert not (folder / "rollout" / STEP).exists()
        server.call("/pause?mode=wait")
        wait_for(folder / "rollout" / STEP)
    finally:
        server.close()
    pairs = [(ids, answer["token_ids"]) for ids, answer in zip(PROMPTS, answers, strict=True)]
    steps = folder / "steps.json"
    steps.write_text(json.dumps({"0": pairs}), encoding="utf-8")
    words = [str(TRAINER), str(folder / "train"), model, str(steps)]
    said_by(None, words, {"OMP_NUM_THREADS": "1"}, timeout=580)
    return load_record(RecordingRecord, folder / "rollout" / STEP / RECORDING)


def compared(cli: Cli, folder: Path) -> Outcome:
    return cli("compare", folder / "rollout", folder / "train", "--run-dir", folder / "compared")


@pytest.fixture(autouse=True)
def vllm() -> None:
    require_engine("vllm")


def test_a_preempted_request_is_recorded(cli: Cli, tmp_path: Path) -> None:
    record = recorded(tmp_path)
    first, *others = record.requests
    assert first.chunks > 1, record.requests
    assert any(each.cached for each in others)
    again = [each for each in others if each.preemptions]
    assert again
    assert all(each.recomputed for each in again)
    outcome = compared(cli, tmp_path)
    assert outcome.verdict is not None, outcome.err
    assert outcome.verdict["precheck"]["mismatches"] == []
    assert outcome.code == 0, outcome.out
    assert outcome.verdict["coverage"]["fraction"] == 1


def test_a_wrong_position_after_preemption_is_named(cli: Cli, tmp_path: Path) -> None:
    record = recorded(tmp_path, "wrong_position:plugin")
    assert any(each.preemptions for each in record.requests)
    outcome = compared(cli, tmp_path)
    assert outcome.verdict is not None, outcome.err
    assert outcome.code == 4, outcome.out
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert mismatch["name"] == "position"
    assert mismatch["detail"].startswith("rollout decode")
    assert mismatch["rollout"] == mismatch["train"] + 1
