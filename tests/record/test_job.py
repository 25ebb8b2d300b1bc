"""A job that is not ours records itself; the comparison afterwards says what `compare` says."""

import pytest
from command import Cli, command_line, require_engine, spec_here
from recorded_job import Job, assert_same_rows, figures

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
