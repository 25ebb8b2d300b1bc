"""`rlk-align probe`: what it adds to a verdict, and what it asks for."""

import json
from pathlib import Path

import pytest
from command import Cli, Outcome

EDGE = ("--edges", "prefill_vs_train")
PAIR = ("--rollout", "hf:attn=eager", "--max-new-tokens", 6, *EDGE)


@pytest.fixture
def faulty(cli: Cli, few_prompts: Path, tmp_path: Path) -> tuple[Path, Outcome]:
    """A run with a fault on the training side, compared and probed at once."""
    run = tmp_path / "faulty"
    train = ("--train", "hf:attn=eager,fault=norm-eps")
    done = cli("compare", *PAIR, *train, "--prompts", few_prompts, "--run-dir", run, "--probe")
    return run, done


def unit(outcome: Outcome, name: str) -> dict:
    assert outcome.verdict is not None, outcome.err
    (found,) = [u for u in outcome.verdict["units"] if u["name"] == name]
    return found


def test_the_one_introducer_is_named_with_its_side_and_its_place(
    faulty: tuple[Path, Outcome], cli: Cli
) -> None:
    run, done = faulty
    assert done.code == 1, done.out + done.err
    assert done.verdict is not None
    over = done.verdict["divergence"]["first_over_budget"]
    assert (over["site"], over["side"]) == ("layers.0.attn_norm", "train")
    assert over["how"]["train"].startswith("scaled by 0.9")
    assert over["code"]["train"]["module"] == "model.layers.0.input_layernorm"
    assert over["code"]["train"]["file"].startswith("transformers/models/")
    introducers = [u["name"] for u in done.verdict["units"] if u["label"] == "introducer"]
    assert introducers == ["layers.0.attn_norm"]
    first = done.verdict["units"][0]
    assert first["name"] == "layers.0.attn_norm"
    assert first["over_budget"] == over
    assert first["introduced"]["rel_l2"] > 0.01
    assert first["inherited"]["rel_l2"] == 0
    assert unit(done, "layers.0.q_proj")["introduced"]["rel_l2"] == 0
    assert unit(done, "layers.0.q_proj")["inherited"]["rel_l2"] > 0.01
    assert "introducers: 1, 1 beyond their budgets" in done.out
    assert "layers.0.attn_norm  the training side is off" in done.out
    largest = done.verdict["divergence"]["largest_amplifier"]
    assert largest["gain"] > 1
    assert largest["site"] != "logprob"

    kept = json.loads((run / "verdict.json").read_text())
    assert kept["units"] == done.verdict["units"]
    judged = cli("gate", run)
    assert judged.verdict is not None
    assert judged.verdict["units"] == done.verdict["units"]

    attributed = cli("probe", run, "--attribute")
    assert attributed.verdict is not None, attributed.err
    contributor = attributed.verdict["divergence"]["largest_contributor"]
    assert contributor["site"] == "layers.0.attn_norm"
    delta = attributed.verdict["edges"]["prefill_vs_train"]["mean_abs_dlogp"]
    assert contributor["mean_abs_dlogp"] == pytest.approx(delta)

    (run / "probe.json").write_text((run / "probe.json").read_text() + " ")
    assert cli("gate", run).code == 3


def test_a_comparison_takes_an_earlier_probe_away(
    faulty: tuple[Path, Outcome], cli: Cli, few_prompts: Path
) -> None:
    run, _ = faulty
    assert (run / "probe.json").is_file()
    again = cli(
        "compare", *PAIR, "--train", "hf:attn=eager", "--prompts", few_prompts, "--run-dir", run
    )
    assert again.code == 0, again.out + again.err
    assert not (run / "probe.json").exists()
    assert again.verdict is not None
    assert "units" not in again.verdict


def test_two_healthy_sides_are_within_their_budgets(
    cli: Cli, few_prompts: Path, tmp_path: Path
) -> None:
    train = ("--train", "hf:attn=sdpa", "--prompts", few_prompts)
    done = cli("probe", "--layerwise", *PAIR, *train, "--run-dir", tmp_path / "run")
    assert done.code == 0, done.out + done.err
    assert "no operator beyond its budget on either side: 144 of 144" in done.out
    assert "all within their budgets" in done.out
    assert done.verdict is not None
    introducers = {u["sites"][-1] for u in done.verdict["units"] if u["label"] == "introducer"}
    assert introducers <= {f"layers.{i}.attn" for i in range(4)}


def test_what_cannot_be_probed_is_said(cli: Cli, few_prompts: Path, tmp_path: Path) -> None:
    single = ("capture", "--engine", "hf", "-o", tmp_path / "a", "--max-new-tokens", 2)
    assert cli(*single, "--prompts", few_prompts).code == 0
    done = cli("probe", tmp_path / "a")
    assert done.code == 2
    assert "is a single capture" in done.err
    done = cli("probe", tmp_path / "a", "--rollout", "hf")
    assert done.code == 2
    assert "a run is probed as it is" in done.err
    assert cli("probe", tmp_path / "nothing").code == 2
