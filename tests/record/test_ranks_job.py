"""Loops of training that are not ours, of several ranks, record themselves: each rank its shard."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from command import Cli, command_line, require_engine, spec_here
from recorded_job import Job, assert_same_rows, figures

from rlk_align.record.shared.layout import incomplete_steps, steps_of


@dataclass(frozen=True)
class Trainer:
    """A trainer of several ranks."""

    ranks: int
    loop: str
    words: tuple[str, ...]
    """The words of the loop before the fault."""
    spec: str
    """The engine of `compare` that computes the same."""
    chunks: int = 1
    """Virtual stages of each rank."""


def megatron(tp: int, pp: int) -> Trainer:
    spec = f"megatron:tp={tp},pp={pp},batch=2,padding=right"
    return Trainer(tp * pp, "megatron_loop.py", (str(tp), str(pp), "1"), spec)


def fsdp(ranks: int) -> Trainer:
    spec = f"fsdp:dp={ranks},batch=2,padding=right,checkpointing=1"
    return Trainer(ranks, "fsdp_loop.py", (), spec)


def zero(stage: int) -> Trainer:
    spec = f"deepspeed:dp=2,stage={stage},batch=2,padding=right,checkpointing=1"
    return Trainer(2, "deepspeed_loop.py", (str(stage),), spec)


TRAINERS = {
    "fsdp2": fsdp(2),
    "fsdp4": fsdp(4),
    "zero1": zero(1),
    "zero3": zero(3),
    "tp2": megatron(2, 1),
    "pp2": megatron(1, 2),
    "tp2pp2": megatron(2, 2),
    "pp2vp2": Trainer(2, "megatron_loop.py", ("1", "2", "1"), "megatron:pp=2", chunks=2),
    # The engine of `compare` has no data-parallel ranks without experts.
    "dp2": Trainer(2, "megatron_loop.py", ("1", "1", "1"), ""),
}


pytestmark = pytest.mark.whole_matrix


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    require_engine("vllm")
    require_engine("megatron")
    require_engine("deepspeed")
    made = Job(tmp_path_factory.mktemp("job"), count=6)
    made.record_rollout()
    return made


@pytest.fixture(scope="module")
def module_cli(job: Job) -> Cli:
    return command_line(job.folder)


def record(job: Job, trainer: str, fault: str = "") -> tuple[str, int, str]:
    """The folder of the recording, the exit code of the job, and its words."""
    one, name = TRAINERS[trainer], f"{trainer}{fault}"
    words = [*one.words, *filter(None, [fault])]
    return name, *job.torchrun(one.ranks, one.loop, name, *words, CHUNKS=str(one.chunks))


@pytest.mark.parametrize("trainer", [name for name, trainer in TRAINERS.items() if trainer.spec])
def test_a_recorded_job_gets_the_verdict_of_compare(
    job: Job, module_cli: Cli, trainer: str
) -> None:
    name, code, said = record(job, trainer)
    assert code == 0, said
    recorded = job.compare(module_cli, name, steps="0 3")
    captured = module_cli(
        *("compare", "--rollout", spec_here("vllm"), "--no-production"),
        *("--train", TRAINERS[trainer].spec, "--prompts", job.prompts, "--max-new-tokens", 24),
        *("--run-dir", job.folder / f"captured-{name}"),
    )
    assert recorded.verdict is not None, recorded.err
    assert captured.verdict is not None, captured.err
    assert captured.code == 0, captured.out
    assert figures(recorded.verdict) == figures(captured.verdict)
    assert_same_rows(job.folder / f"compared-{name}", job.folder / f"captured-{name}")
    # The parameters are kept once, by one rank of those that share them.
    step = job.folder / name / "step-00000003"
    assert not list(step.glob("rank-*/model/*.safetensors"))
    index = json.loads((step / "shared/model/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(
        list(step.glob("shared/model/*.safetensors"))
    )


def test_replicas_of_megatron_are_put_together(job: Job, module_cli: Cli) -> None:
    name, code, said = record(job, "dp2")
    assert code == 0, said
    outcome = job.compare(module_cli, name, steps="0 3")
    assert outcome.code == 0, outcome.out
    assert outcome.verdict is not None
    assert outcome.verdict["coverage"]["fraction"] == 1
    assert outcome.verdict["divergence"]["first_bitwise"]["ranks"] == {"train": [0, 1]}


UP = "layers.1.up_proj"


@pytest.mark.parametrize(
    ("trainer", "fault", "kind", "named", "said"),
    [
        ("fsdp2", "stale", "weights", UP, "train rank 1: rows 256-511 differ"),
        ("fsdp2", "undelivered", "weights", UP, "the rollout is stale: it has what the trainer"),
        ("fsdp2", "theta", "attributes", "rope_theta", "40000.0"),
        ("fsdp2", "theta-on-1", "attributes", "rope_theta", "40000.0 on rank 1"),
        ("fsdp2", "dropout", "attributes", "dropout", "0.1 in model.layers.0.self_attn"),
        ("zero1", "stale", "weights", UP, "train: rank 1 has another copy than rank 0"),
        ("zero3", "theta-on-1", "attributes", "rope_theta", "40000.0 on rank 1"),
        ("zero3", "dropout", "attributes", "dropout", "0.1 in model.layers.0.self_attn"),
        ("tp2", "stale", "weights", UP, "train rank 1: rows 256-511 differ"),
        ("tp2pp2", "stale", "weights", UP, "train rank 1: rows 256-511 differ"),
        ("pp2", "stale", "weights", "layers.3.up_proj", "train rank 1: rows 0-511 differ"),
        ("pp2vp2", "stale", "weights", "layers.3.up_proj", "train rank 1: rows 0-511 differ"),
        ("pp2vp2", "theta", "attributes", "rope_theta", "40000.0"),
        ("tp2pp2", "theta", "attributes", "rope_theta", "40000.0"),
        ("tp2pp2", "dropout", "attributes", "dropout", "0.1 in "),
    ],
)
def test_a_planted_fault_is_named(
    job: Job, module_cli: Cli, trainer: str, fault: str, kind: str, named: str, said: str
) -> None:
    name, code, words = record(job, trainer, fault)
    assert code == 0, words
    outcome = job.compare(module_cli, name, steps="0 3")
    assert outcome.code == 4, outcome.err
    assert outcome.verdict is not None, outcome.err
    [mismatch] = outcome.verdict["precheck"]["mismatches"]
    assert (mismatch["kind"], mismatch["name"]) == (kind, named)
    assert said in f"{mismatch['train']} {mismatch['detail']}", mismatch
    allowed = job.compare(
        module_cli, name, "--allow-mismatch", kind, steps="0 3", into=f"allowed-{name}"
    )
    assert allowed.verdict is not None, allowed.err
    assert allowed.verdict["coverage"]["fraction"] == 1
    assert said.partition(":")[0] in " ".join(allowed.out.split())


@pytest.mark.parametrize(
    ("trainer", "also"),
    # Megatron's rotary embedding ignores position ids.
    [("fsdp2", []), ("tp2", ["position"]), ("tp2pp2", ["position"])],
)
def test_a_shifted_mask_of_a_packed_batch_is_named(
    job: Job, module_cli: Cli, trainer: str, also: list[str]
) -> None:
    for fault, names in (("packed", also), ("mask", [*also, "sequence_boundary"])):
        name, code, words = record(job, trainer, fault)
        assert code == 0, words
        outcome = job.compare(module_cli, name, steps="0 3")
        assert outcome.verdict is not None, outcome.err
        mismatches = outcome.verdict["precheck"]["mismatches"]
        assert [m["name"] for m in mismatches] == names
        if fault == "mask":
            assert "train prefill" in mismatches[-1]["detail"]
            assert mismatches[-1]["ranks"] == ([0] if trainer == "fsdp2" else [])


def compared_without_rank_1(job: Job, cli: Cli, name: str) -> tuple[list[Any], str]:
    """Compares what is complete, and sees that the missing shard is named; (rows that are not
    paired, what was printed)."""
    outcome = job.compare(cli, name, steps="0 3")
    assert outcome.verdict is not None, outcome.err
    assert outcome.code != 0
    lacking = outcome.verdict["coverage"]["unpaired"]
    assert lacking
    assert all("train prefill, without the shard of rank 1," in each["reason"] for each in lacking)
    assert 0 < outcome.verdict["coverage"]["fraction"] < 1
    return lacking, outcome.err


@pytest.mark.parametrize("trainer", ["fsdp2", "pp2", "pp2vp2"])
def test_a_killed_rank_is_named(job: Job, module_cli: Cli, trainer: str) -> None:
    name, code, words = record(job, trainer, "killed")
    assert code != 0, words
    lacking, _ = compared_without_rank_1(job, module_cli, name)
    # What is complete is compared.
    sites = {site for each in lacking for site in each["site"].split(", ")}
    assert trainer == "fsdp2" or not any(site.startswith("layers.0.") for site in sites)


@pytest.mark.parametrize("trainer", ["fsdp2", "pp2"])
def test_a_full_disk_of_a_rank_costs_its_shard_alone(
    job: Job, module_cli: Cli, trainer: str
) -> None:
    name, code, words = record(job, trainer, "full")
    assert code == 0, words
    assert "rlk-align lost step 3 of rank 1: the trace could not be written" in words
    _, said = compared_without_rank_1(job, module_cli, name)
    assert "did not complete them: 1 (the trace could not be written" in said


@pytest.mark.parametrize("trainer", ["fsdp2", "tp2pp2"])
def test_a_full_disk_before_the_forwards_costs_the_step(job: Job, trainer: str) -> None:
    name, code, words = record(job, trainer, "full-weights")
    assert code == 0, words
    assert words.count("rlk-align does not record step 3") == TRAINERS[trainer].ranks
    assert not steps_of(job.folder / name)
    assert "model-00000-00000.safetensors" in incomplete_steps(job.folder / name)[3]


def test_clocks_that_jump_change_nothing(job: Job, module_cli: Cli) -> None:
    name, code, words = record(job, "fsdp2", "clock")
    assert code == 0, words
    outcome = job.compare(module_cli, name, steps="0 3")
    assert outcome.verdict is not None, outcome.err
    assert outcome.code == 0, outcome.out
    assert outcome.verdict["coverage"]["fraction"] == 1


@pytest.mark.parametrize("trainer", ["fsdp2", "tp2"])
def test_a_second_job_is_refused_on_every_rank(job: Job, trainer: str) -> None:
    record(job, trainer)
    _, again, words = record(job, trainer)
    assert again != 0, words
    assert words.count("step 3 is recorded already") >= TRAINERS[trainer].ranks


def test_a_rank_without_one_of_its_virtual_stages_is_refused(job: Job) -> None:
    _, code, words = record(job, "pp2vp2", "half")
    assert code != 0, words
    assert "a rank with 2 virtual stages of which 1 are given is not recorded" in words
