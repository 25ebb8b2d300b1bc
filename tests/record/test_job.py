"""A job that is not ours records itself; the comparison afterwards says what `compare` says."""

import shutil
from pathlib import Path

import pytest
from changed_weights import save, tensors, trained
from command import Cli, Outcome, command_line, require_engine, spec_here
from recorded_job import Job, assert_same_rows, figures

from rlk_align.data import data_path

TRAINER = "hf:batch=2,padding=right"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    require_engine("vllm")
    made = Job(tmp_path_factory.mktemp("job"), count=4)
    made.record_rollout()
    return made


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


def test_a_recorded_job_gets_the_verdict_of_compare(job: Job, module_cli: Cli) -> None:
    job.run("train")
    recorded = job.compare(module_cli, into="compared")
    captured = module_cli(
        *("compare", "--rollout", spec_here("vllm"), "--train", TRAINER, "--no-production"),
        *("--prompts", job.prompts, "--max-new-tokens", 24, "--run-dir", job.folder / "captured"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert captured.code == 0, captured.out
    assert figures(recorded.verdict) == figures(captured.verdict)
    assert_same_rows(job.folder / "compared", job.folder / "captured")


@pytest.mark.parametrize(
    ("fault", "kind", "named", "by_side"),
    [
        # The operators are recomputed with the weights that the trainer saved.
        ("stale", "weights", "layers.1.up_proj", "from rollout decode layers.1.up_proj on"),
        ("theta", "attributes", "rope_theta", "layers.0.q_rope the training side is off"),
    ],
)
def test_a_planted_fault_is_named(
    job: Job, module_cli: Cli, fault: str, kind: str, named: str, by_side: str
) -> None:
    job.run("train", fault)
    outcome = job.compare(module_cli, f"train{fault}")
    assert outcome.code == 4, outcome.out
    assert outcome.verdict is not None
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == (kind, named)
    assert mismatch["rollout"] != mismatch["train"]
    allowed = module_cli(
        *("compare", job.folder / "rollout", job.folder / f"train{fault}"),
        *("--allow-mismatch", kind, "--run-dir", job.folder / f"allowed{fault}"),
    )
    assert allowed.verdict is not None
    said = " ".join(allowed.out.split())
    assert by_side in said
    assert allowed.verdict["coverage"]["fraction"] == 1


def words(outcome: Outcome) -> str:
    return " ".join(outcome.out.split())


def test_weights_that_were_not_saved_are_read_from_a_checkpoint_with_their_digests(
    cli: Cli, tmp_path: Path
) -> None:
    require_engine("vllm")
    checkpoint = shutil.copytree(data_path("model"), tmp_path / "checkpoint")
    job = Job(tmp_path, count=4, model=checkpoint)
    job.record_rollout()
    job.run("train", "unsaved")
    named = job.compare(cli, "trainunsaved")
    assert named.verdict is not None, named.err
    assert named.code == 0, named.out
    unchecked = "operators were not checked against float64"
    assert unchecked not in words(named)

    moved = shutil.move(checkpoint, tmp_path / "moved")
    without = job.compare(cli, "trainunsaved", into="without")
    assert without.verdict is not None, without.err
    assert "operators with weights are not recomputed" in without.err
    assert f"{checkpoint} has none here" in without.err
    assert "give the folder of the checkpoint by --model" in " ".join(without.err.split())
    assert unchecked in words(without)

    given = job.compare(cli, "trainunsaved", "--model", str(moved), into="given")
    assert given.verdict is not None, given.err
    assert figures(given.verdict) == figures(named.verdict)

    other = save(tmp_path / "other", trained(tensors(), 1))
    wrong = job.compare(cli, "trainunsaved", "--model", other, into="wrong")
    assert wrong.verdict is not None, wrong.err
    assert unchecked in words(wrong)
    assert "in its engine differs from the checkpoint's" in words(wrong)

    empty = job.compare(cli, "trainunsaved", "--model", str(tmp_path / "rollout"), into="empty")
    assert empty.code == 2
