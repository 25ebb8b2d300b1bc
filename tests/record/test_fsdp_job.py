"""A loop of training with FSDP2 that is not ours records itself, each rank its own sequences."""

import json

import pytest
from command import Cli, command_line, require_engine, spec_here
from recorded_job import Job, assert_same_rows, figures

LOOP = "fsdp_loop.py"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    require_engine("vllm")
    made = Job(tmp_path_factory.mktemp("job"), count=6)
    made.record_rollout()
    return made


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_recorded_job_gets_the_verdict_of_compare(job: Job, module_cli: Cli, ranks: int) -> None:
    fault = f"healthy{ranks}"
    code, said = job.torchrun(ranks, LOOP, fault)
    assert code == 0, said
    recorded = job.compare(module_cli, fault, steps="0 3")
    captured = module_cli(
        *("compare", "--rollout", spec_here("vllm"), "--no-production"),
        *("--train", f"fsdp:dp={ranks},batch=2,padding=right,checkpointing=1"),
        *("--prompts", job.prompts, "--max-new-tokens", 24),
        *("--run-dir", job.folder / f"captured{ranks}"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert captured.code == 0, captured.out
    assert figures(recorded.verdict) == figures(captured.verdict)
    assert_same_rows(job.folder / f"compared-{fault}", job.folder / f"captured{ranks}")


@pytest.mark.parametrize(
    ("fault", "kind", "named", "said"),
    [
        ("stale", "weights", "layers.1.up_proj", "train rank 1"),
        ("theta", "attributes", "rope_theta", ""),
        ("theta-on-1", "attributes", "rope_theta", "on rank 1"),
        ("dropout", "attributes", "active_dropout", ""),
        ("mask", "boundaries", "attention", "train"),
    ],
)
def test_a_planted_fault_is_named(
    job: Job, module_cli: Cli, fault: str, kind: str, named: str, said: str
) -> None:
    code, words = job.torchrun(2, LOOP, fault)
    assert code == 0, words
    outcome = job.compare(module_cli, fault, steps="0 3")
    assert outcome.verdict is not None, outcome.err
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == (kind, named)
    assert said in json.dumps(mismatch)


def test_an_allowed_stale_layer_gets_its_side(job: Job, module_cli: Cli) -> None:
    outcome = job.compare(module_cli, "stale", "--allow-mismatch", "weights", steps="0 3")
    assert outcome.verdict is not None, outcome.err
    assert "the training side" in outcome.out


def test_a_killed_rank_is_named(job: Job, module_cli: Cli) -> None:
    code, words = job.torchrun(2, LOOP, "killed")
    assert code != 0, words
    outcome = job.compare(module_cli, "killed", steps="0 3")
    assert outcome.verdict is not None, outcome.err
    lacking = outcome.verdict["coverage"]["unpaired"]
    assert any("without the shard of rank 1" in each["reason"] for each in lacking), lacking
    assert 0 < outcome.verdict["coverage"]["fraction"] < 1
    assert outcome.code != 0


def test_a_healthy_packed_batch_is_paired(job: Job, module_cli: Cli) -> None:
    code, words = job.torchrun(2, LOOP, "packed")
    assert code == 0, words
    outcome = job.compare(module_cli, "packed", steps="0 3")
    assert outcome.verdict is not None, outcome.err
    assert outcome.verdict["coverage"]["fraction"] == 1
    assert outcome.verdict["precheck"]["status"] == "pass", outcome.out
