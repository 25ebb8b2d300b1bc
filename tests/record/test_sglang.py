"""An Engine of SGLang records itself; the comparison afterwards says what `compare` says."""

from pathlib import Path

import pytest
from command import Cli, command_line, require_engine, spec_here
from recorded_job import Job, assert_same_rows, figures

from rlk_align.record.shared.layout import RECORDING, RecordingRecord, incomplete_steps, steps_of
from rlk_align.trace.records import load_record

pytestmark = [pytest.mark.whole_matrix, pytest.mark.timeout(1800)]
TRAINER = "hf:batch=2,padding=right"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    require_engine("sglang")
    made = Job(tmp_path_factory.mktemp("job"), count=4)
    made.record_sglang()
    return made


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


def record_of(job: Job, step: int) -> RecordingRecord:
    return load_record(
        RecordingRecord, steps_of(job.folder / "rollout")[step] / "rank-0" / RECORDING
    )


def test_a_recorded_engine_gets_the_verdict_of_compare(job: Job, module_cli: Cli) -> None:
    job.run("train")
    recorded = job.compare(module_cli, into="compared", steps="0 0")
    captured = module_cli(
        *("compare", "--rollout", spec_here("sglang"), "--train", TRAINER, "--no-production"),
        *("--prompts", job.prompts, "--max-new-tokens", 24, "--run-dir", job.folder / "captured"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert captured.code == 0, captured.out
    assert figures(recorded.verdict) == figures(captured.verdict)
    assert_same_rows(job.folder / "compared", job.folder / "captured")


def test_a_call_is_a_step(job: Job) -> None:
    assert list(steps_of(job.folder / "rollout")) == [0, 1]
    assert [record_of(job, step).seen for step in (0, 1)] == [4, 2]


@pytest.mark.parametrize(
    ("fault", "kind", "named", "by_side"),
    [
        ("stale", "weights", "layers.1.up_proj", "from rollout decode layers.1.up_proj on"),
        ("theta", "attributes", "rope_theta", "layers.0.q_rope the training side is off"),
    ],
)
def test_a_fault_of_the_trainer_is_named(
    job: Job, module_cli: Cli, fault: str, kind: str, named: str, by_side: str
) -> None:
    job.run("train", fault)
    outcome = job.compare(module_cli, f"train{fault}", steps="0 0")
    assert outcome.code == 4, outcome.out
    assert outcome.verdict is not None
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == (kind, named)
    allow = ("--allow-mismatch", kind)
    allowed = job.compare(module_cli, f"train{fault}", *allow, steps="0 0", into=f"allowed-{fault}")
    assert by_side in " ".join(allowed.out.split())


def test_a_fault_of_the_engine_is_named(cli: Cli, tmp_path: Path) -> None:
    require_engine("sglang")
    job = Job(tmp_path, count=4)
    job.record_sglang("wrong_product:plugin")
    job.run("train")
    outcome = job.compare(cli, steps="0 0")
    assert outcome.code == 1, outcome.out
    assert outcome.verdict is not None
    assert outcome.verdict["precheck"]["mismatches"] == []
    assert "layers.1.down_proj the rollout side is off" in " ".join(outcome.out.split())


def test_log_probs_at_another_temperature_are_not_recorded_unless_raw(tmp_path: Path) -> None:
    require_engine("sglang")
    job = Job(tmp_path, count=2)
    job.record_sglang(RAW="0")
    assert list(steps_of(tmp_path / "rollout")) == [0]
    [reason] = incomplete_steps(tmp_path / "rollout").values()
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB=1 makes them raw (2)" in reason


@pytest.mark.parametrize(
    ("settings", "environment", "why"),
    [
        (
            '{"enable_lora": true, "max_lora_rank": 8, "lora_target_modules": ["all"]}',
            {},
            "adapters: not recorded",
        ),
        ('{"dp_size": 2}', {}, "data-parallel engines: not recorded"),
        ("{}", {"RLK_KERNELS": "1"}, "RLK_KERNELS=1: not recorded"),
        ("{}", {"RLK_RECORD_WINDOW": "none"}, "it must be a number of at least 1"),
    ],
)
def test_what_is_not_recorded_is_refused_before_it_starts(
    tmp_path: Path, settings: str, environment: dict[str, str], why: str
) -> None:
    require_engine("sglang")
    job = Job(tmp_path, count=1)
    with pytest.raises(AssertionError, match=why):
        job.record_sglang(SGLANG=settings, **environment)
