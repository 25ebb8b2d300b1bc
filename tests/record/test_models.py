"""Jobs with the embedded sparse model and the embedded hybrid model record themselves."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Cli, command_line, require_engine, spec_here
from pair_models import SPARSE, TRAINED_HYBRID
from recorded_job import Job, assert_same_rows, figures

pytestmark = [pytest.mark.whole_matrix, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Case:
    """A model, and a weight of rank 1 that is stale in its trainer."""

    path: Path
    stale: str
    rows: str


CASES = {
    "sparse": Case(SPARSE, "layers.1.experts.4.up_proj", "rows 0-159"),
    "hybrid": Case(TRAINED_HYBRID, "layers.1.up_proj", "rows 224-447"),
}


@pytest.fixture(scope="module", params=CASES)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    require_engine("vllm")
    folder = tmp_path_factory.mktemp(request.param)
    made = Job(folder, count=4, model=CASES[request.param].path)
    made.record_rollout()
    return made


@pytest.fixture
def case(job: Job) -> Case:
    return next(case for case in CASES.values() if str(case.path) == job.model)


@pytest.fixture
def cli_of_job(job: Job) -> Cli:
    return command_line(job.folder)


TRAINERS = {
    # The ranks, the loop with its words, and the engine of `compare` that computes the same.
    "hf": (1, "", (), "hf:batch=2,padding=right"),
    "fsdp2": (2, "fsdp_loop.py", (), "fsdp:dp=2,checkpointing=1,batch=2,padding=right"),
    "ep2": (2, "megatron_loop.py", ("1", "1", "2"), "megatron:ep=2,batch=2,padding=right"),
}


def record(job: Job, trainer: str, fault: str = "") -> str:
    """The steps of the rollout and of the trainer whose folder is `trainer` and the fault."""
    ranks, loop, words, _ = TRAINERS[trainer]
    if not loop:
        job.run("train")
        (job.folder / "train").rename(job.folder / trainer)
        return "0 0"
    code, said = job.torchrun(ranks, loop, trainer + fault, *words, *filter(None, [fault]))
    assert code == 0, said
    return "0 3"


def skip_what_megatron_lacks(trainer: str, case: Case) -> None:
    if trainer == "ep2":
        require_engine("megatron")
        if case.path != SPARSE:
            pytest.skip("a model without experts")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_recorded_job_gets_the_verdict_of_compare(
    job: Job, case: Case, cli_of_job: Cli, trainer: str
) -> None:
    skip_what_megatron_lacks(trainer, case)
    recorded = job.compare(cli_of_job, trainer, steps=record(job, trainer))
    captured = cli_of_job(
        *("compare", "--model", job.model, "--rollout", spec_here("vllm"), "--no-production"),
        *("--train", TRAINERS[trainer][3], "--prompts", job.prompts, "--max-new-tokens", 24),
        *("--run-dir", job.folder / f"captured-{trainer}"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert figures(recorded.verdict) == figures(captured.verdict)
    assert recorded.verdict.get("routing") == captured.verdict.get("routing")
    assert_same_rows(job.folder / f"compared-{trainer}", job.folder / f"captured-{trainer}")


@pytest.mark.parametrize("trainer", ["fsdp2", "ep2"])
def test_a_stale_weight_of_a_rank_is_named(
    job: Job, case: Case, cli_of_job: Cli, trainer: str
) -> None:
    skip_what_megatron_lacks(trainer, case)
    outcome = job.compare(cli_of_job, f"{trainer}stale", steps=record(job, trainer, "stale"))
    assert outcome.code == 4, outcome.err
    assert outcome.verdict is not None, outcome.err
    # The hybrid's sides also have other constants, which every healthy pair of these engines has.
    [mismatch] = [m for m in outcome.verdict["precheck"]["mismatches"] if m["kind"] == "weights"]
    assert mismatch["name"] == case.stale
    assert f"train rank 1: {case.rows} differ" in mismatch["detail"], mismatch
