"""A job that trains a LoRA adapter records itself, and one that was not delivered is named."""

import json
from pathlib import Path

import pytest
import torch
from command import Cli, command_line, require_engine, spec_here
from lora import changed_adapter, write_adapter
from recorded_job import Job, assert_same_rows, figures
from served import Server, plugin_folder, wait_for

from rlk_align.data import data_path
from rlk_align.record.shared.layout import RECORDING, RecordingRecord
from rlk_align.trace.records import load_record

pytestmark = [pytest.mark.whole_matrix, pytest.mark.timeout(1800)]
RANKS = "dp=2,batch=2,padding=right,checkpointing=1"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters") / "first"
    return write_adapter(folder, data_path("model"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Job:
    require_engine("vllm")
    made = Job(tmp_path_factory.mktemp("job"), count=4)
    made.record_rollout(ADAPTER=str(adapter))
    return made


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


@pytest.mark.parametrize(
    ("trainer", "engine"), [("train", "hf:batch=2,padding=right"), ("fsdp2", f"fsdp:{RANKS}")]
)
def test_a_recorded_job_gets_the_verdict_of_compare(
    job: Job, adapter: Path, module_cli: Cli, trainer: str, engine: str
) -> None:
    if trainer == "train":
        job.run("train", ADAPTER=str(adapter))
    else:
        code, said = job.torchrun(2, "fsdp_loop.py", trainer, ADAPTER=str(adapter))
        assert code == 0, said
    recorded = job.compare(module_cli, trainer, steps="0 0" if trainer == "train" else "0 3")
    lora = f"lora={adapter}"
    captured = module_cli(
        *("compare", "--rollout", f"{spec_here('vllm')}:{lora}", "--train", f"{engine},{lora}"),
        *("--no-production", "--prompts", job.prompts, "--max-new-tokens", 24),
        *("--run-dir", job.folder / f"captured-{trainer}"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert captured.code == 0, captured.out
    assert figures(recorded.verdict) == figures(captured.verdict)
    assert_same_rows(job.folder / f"compared-{trainer}", job.folder / f"captured-{trainer}")


def test_an_adapter_that_was_not_delivered_is_named(
    job: Job, adapter: Path, module_cli: Cli, tmp_path: Path
) -> None:
    """The trainer has made a step, and the rollout still has the adapter from before."""

    def trained(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: f * 1.25 + 0.001 if "lora_B" in n else f for n, f in factors.items()}

    second = changed_adapter(tmp_path / "second", adapter, trained)
    code, said = job.torchrun(2, "fsdp_loop.py", "later", ADAPTER=str(second))
    assert code == 0, said
    outcome = job.compare(module_cli, "later", steps="0 3")
    assert outcome.code == 4, outcome.err
    assert outcome.verdict is not None, outcome.err
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == ("weights", "adapter")
    assert mismatch["detail"].startswith("B has other values in 28 projections")
    assert mismatch["detail"].endswith("an adapter of another step, or one that was not delivered")


def test_requests_without_the_adapter_are_named(adapter: Path, cli: Cli, tmp_path: Path) -> None:
    """The loop forgets to give its requests the adapter."""
    require_engine("vllm")
    job = Job(tmp_path, count=2)
    job.record_rollout()
    job.run("train", ADAPTER=str(adapter))
    outcome = job.compare(cli)
    assert outcome.code == 4, outcome.err
    assert outcome.verdict is not None, outcome.err
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert mismatch["detail"] == (
        "the rollout has no adapter; the trainer has one of rank 4 in 28 projections: every one "
        "of them will differ"
    )


def test_a_server_records_the_requests_of_one_adapter(
    adapter: Path, cli: Cli, tmp_path: Path
) -> None:
    require_engine("vllm")
    job = Job(tmp_path, count=3)
    prompts = json.loads(job.ids.read_text())
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"policy={adapter}"]
    targets = ["--lora-target-modules", *("q_proj", "k_proj", "v_proj", "o_proj")]
    targets += ["gate_proj", "up_proj", "down_proj"]
    words = ["--enforce-eager", "--no-enable-prefix-caching", *lora, *targets]
    rollout = tmp_path / "rollout"
    environment = {"RLK_RECORD": str(rollout), "RLK_RECORD_WINDOW": "4"}
    plugin = plugin_folder(tmp_path / "plugin")
    server = Server(job.model, plugin, tmp_path / "server.log", words, **environment)
    try:
        server.wait()
        requests = [
            {"ids": ids, "name": f"r{i}", "max_tokens": 16, "model": "policy"}
            for i, ids in enumerate(prompts)
        ]
        answers = [server.post(**each) for each in requests]
        server.post(prompts[0], "base", max_tokens=4)
        step = wait_for(rollout / "step-00000000/rank-0")
    finally:
        server.close()
    record = load_record(RecordingRecord, step / RECORDING)
    assert record.unrecorded == {"another adapter than that of the first recorded request": 1}
    pairs = [[ids, answer["token_ids"]] for ids, answer in zip(prompts, answers, strict=True)]
    (tmp_path / "ids.json").write_text(json.dumps(pairs))
    job.run("train", ADAPTER=str(adapter))
    outcome = job.compare(cli)
    assert outcome.verdict is not None, outcome.err
    assert outcome.verdict["precheck"]["mismatches"] == []
    assert outcome.code == 0, outcome.out
    assert outcome.verdict["coverage"]["fraction"] == 1
