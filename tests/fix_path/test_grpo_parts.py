"""The options, files and tables of examples/grpo, without an engine."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))


@pytest.mark.parametrize(
    ("words", "ranks", "why"),
    [
        ("--group 1", "1", "argument --group: 1 is below 2"),
        ("--problems 0", "1", "argument --problems: 0 is below 1"),
        ("--turns 0", "1", "argument --turns: 0 is below 1"),
        ("--rollout-batch -3", "1", "argument --rollout-batch: -3 is below 1"),
        ("--problems 1", "2", "--problems 1: each of the 2 ranks needs a problem"),
        ("--clip 2 1", "1", "--clip 2.0 1.0: neither may be negative, and LOW is at most 1"),
        ("--clip nan 1", "1", "--clip nan 1.0: "),
        ("--eval-every 1 --held-out 0", "1", "leaves no problems to measure the reward by"),
        ("--model runs/none", "1", "--model runs/none: no config.json is there"),
        ("--device cuda:99", "1", "--device cuda:99: torch finds no GPU"),
        ("--graphs", "1", "--graphs: capturing needs the kernels, and one GPU in one process"),
        ("--graphs --device cuda --kernels off", "1", "--graphs: capturing needs the kernels, and"),
        ("--graphs --device cuda", "2", "--graphs: capturing needs the kernels, and one GPU"),
        ("--graphs --device cuda --loss gspo", "1", "--graphs: the loss gspo waits for the GPU"),
        ("--graphs --device cuda --top-p 0.9", "1", "--graphs: no run with a temperature or a"),
        ("--temperature 0", "1", "--temperature 0.0: a number above 0 is needed"),
        ("--temperature nan", "1", "--temperature nan: a number above 0 is needed"),
        ("--top-p 0", "1", "--top-p 0.0: it must be above 0, and at most 1"),
        ("--top-k -1", "1", "argument --top-k: -1 is below 0"),
        ("--min-p 2", "1", "--min-p 2.0: it must be from 0 to 1"),
        ("--kernels off --top-p 0.9 --min-p 0.1", "1", "within limits; omit --top-p, --min-p"),
    ],
)
def test_options_that_cannot_be_run_are_refused_at_once(
    words: str, ranks: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    from options import arguments

    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole = ["--run", str(tmp_path), "--device", "cpu"]
    arguments([*whole, "--problems", "2"])
    with pytest.raises(SystemExit) as ended:
        arguments([*whole, *words.split()])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_the_trainers_digests_follow_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of fused products too, of which the canonical parameters are copies."""
    from options import arguments
    from pair_models import GATED, HYBRID
    from random_model import write_random_model
    from ranks import Ranks
    from trainer import Trainer

    monkeypatch.setenv("WORLD_SIZE", "1")
    dense = HYBRID | GATED | {"dtype": "bfloat16", "mlp_only_layers": [0, 1, 2, 3]}
    model = write_random_model(tmp_path / "model", model_type="qwen3_next", **dense)
    words = ["--run", str(tmp_path / "run"), "--device", "cpu", "--model", str(model)]
    trainer = Trainer(arguments(words), Ranks(torch.device("cpu")), nullcontext)
    before = trainer.digests()
    assert {"layers.0.qkv_in", "layers.0.a", "layers.0.decay", "embed"} <= before.keys()
    with torch.no_grad():
        for parameter in trainer.parameters.values():
            parameter.mul_(-1)
    after = trainer.digests()
    assert after.keys() == before.keys()
    assert not [name for name, digest in after.items() if digest == before[name]]


@pytest.mark.parametrize("folder", ["run", "run/rank-1"])
def test_a_saved_run_is_not_written_over(folder: str, capsys: Any, tmp_path: Path) -> None:
    from options import arguments

    (tmp_path / folder).mkdir(parents=True)
    words = ["--run", str(tmp_path / "run"), "--device", "cpu"]
    arguments(words)
    (tmp_path / folder / "state.safetensors").touch()
    arguments([*words, "--resume"])
    # A folder may contain several runs.
    arguments(["--run", str(tmp_path), "--device", "cpu"])
    with pytest.raises(SystemExit):
        arguments(words)
    assert "has a saved run; continue it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("lost", "other number of samples: 1 of 2 answers"),
        ("twice", "other number of samples: 3 of 2 answers"),
        ("exchanged", "tokens of another answer: sample 0 "),
        ("longer prompt", "tokens of another answer: sample 1 "),
    ],
)
def test_samples_of_other_answers_are_named(fault: str, name: str) -> None:
    from batch import Answer, Span, to_sample
    from checks import LoopFault, check_masks
    from problems import held_out

    answers = [
        Answer(held_out(1)[0], 0, [1, 2, token, 4], 2, [Span(2, (-0.5, -0.25), cut=False)])
        for token in (3, 5)
    ]
    first, second = samples = [to_sample(answer, 1.0) for answer in answers]
    check_masks(answers, samples)
    with pytest.raises(LoopFault, match=name):
        check_masks(
            answers,
            {
                "lost": [first],
                "twice": [first, first, second],
                "exchanged": [second, first],
                "longer prompt": [first, replace(second, prompt_length=3)],
            }[fault],
        )


def trained() -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    """A master weight after a step of AdamW."""
    masters = {"weight": torch.arange(6.0)}
    optimizer = torch.optim.AdamW(masters.values(), fused=False)
    masters["weight"].grad = torch.ones(6)
    optimizer.step()
    return masters, optimizer


def test_a_state_is_replaced_by_a_whole_one_alone(tmp_path: Path) -> None:
    """A full disk, or a rank that has not written its state, does not remove the previous state."""
    from record import load, save

    (masters, optimizer), same = trained(), {"seed": "1"}
    save(tmp_path, 3, same, masters, optimizer, wait=lambda: None)
    saved = masters["weight"].clone()

    def another_rank_ended() -> None:
        assert (tmp_path / "state.safetensors.partial").exists()
        raise RuntimeError("a rank ended")

    masters["weight"].fill_(0.5)
    with pytest.raises(RuntimeError, match="a rank ended"):
        save(tmp_path, 4, same, masters, optimizer, wait=another_rank_ended)
    assert load(tmp_path, same, masters, optimizer) == 3
    assert masters["weight"].equal(saved)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "other parameters"])
def test_a_damaged_state_is_named(damage: str, tmp_path: Path) -> None:
    from record import load, save

    masters, optimizer = trained()
    save(tmp_path, 3, {}, masters, optimizer, wait=lambda: None)
    path = tmp_path / "state.safetensors"
    whole = path.read_bytes()
    if damage == "other parameters":
        masters["bias"] = torch.zeros(2)
    else:
        path.write_bytes({"cut": whole[:-8], "noise": os.urandom(500), "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"state.safetensors is damaged: .*begin another run"):
        load(tmp_path, {}, masters, optimizer)


def test_a_disk_without_space_is_named(tmp_path: Path) -> None:
    from record import append, save

    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics.jsonl could not be written: .*No space left"):
        append(tmp_path / "metrics.jsonl", {"step": 0})
    (tmp_path / "state.safetensors.partial").mkdir()
    with pytest.raises(OSError, match=r"state.safetensors could not be written: .*--resume"):
        save(tmp_path, 1, {}, *trained(), wait=lambda: None)


def test_what_is_done_again_is_forgotten(tmp_path: Path) -> None:
    """Also an incomplete line, and the sequences of later steps from another run."""
    from record import forget_after

    lines = "".join(json.dumps({"step": step}) + "\n" for step in range(4))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 4, "rew', encoding="utf-8")
    log_probs = tmp_path / "log-probs"
    log_probs.mkdir()
    for step in range(5):
        (log_probs / f"step_{step:06d}_rank_0_of_1.jsonl").touch()
    forget_after(tmp_path, log_probs, 2)
    left = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert left == "".join(lines.splitlines(True)[:2])
    names = sorted(path.name[:11] for path in log_probs.iterdir())
    assert names == ["step_000000", "step_000001"]


def test_problems_that_do_not_exist_are_not_sought_without_an_end() -> None:
    from problems import held_out, training

    family = ("sequence",)  # It has 279 of them.
    assert len({problem.prompt for problem in held_out(250, family)}) == 250
    assert len(training(0, 1, 30, 250, family)) == 30
    with pytest.raises(ValueError, match="the families sequence have no problems except 279"):
        held_out(280, family)
    with pytest.raises(
        ValueError, match="no problems except 279 that are held out; hold out fewer"
    ):
        training(0, 1, 1, 279, family)


def test_tables_and_charts_name_what_is_not_there(tmp_path: Path) -> None:
    from chart import steps
    from summary import summary

    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st', encoding="utf-8")
    for read in (steps, lambda run: summary([run])):
        with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is incomplete; .*--resume"):
            read(tmp_path)
    assert summary([tmp_path / "none"]) == f"no step was taken in {tmp_path / 'none'}"
    with pytest.raises(ValueError, match="has no steps"):
        steps(tmp_path / "none")
