"""A mismatch is assigned to its edge; engines are simulated by noise of the published level."""

import dataclasses
import json
import shlex

import numpy as np
import pytest
from simulate_dumps import healthy

from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import explain
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.rescore.choose import Choice
from rlk_align.logs.rescore.record import Rescored
from rlk_align.logs.rescore.split import Scores, split
from rlk_align.report.rescored_json import rescored_json
from rlk_align.results import EngineRecord

RUN = healthy(3, 12_000)
CONTRACT = load_run_contract()


def noisy(values: np.ndarray, seed: int, c: float = 0.04) -> np.ndarray:
    """The same log-probs from another engine: E|Δ| = c (1 − p)."""
    noise = np.random.default_rng(seed).laplace(size=len(values))
    other = values + np.where(RUN.compared, c * -np.expm1(values) * noise, 0.0)
    return np.where(other > 0, values, other)


def rescored(
    run: Sequences, missing: np.ndarray | None = None, model: str = "m", **sides: np.ndarray
) -> Rescored:
    choice = Choice(
        sequences=run,
        temperature=1.0,
        worst=0,
        usable=len(run),
        total=len(run),
        notes=(),
    )
    nothing = np.zeros(run.tokens, dtype=bool) if missing is None else missing
    scores = {side: Scores(values, nothing, "bfloat16") for side, values in sides.items()}
    engine = EngineRecord(
        name="hf",
        version="1",
        options={"attn": "a b"},
        dtype="bfloat16",
        model=model,
        environment={},
    )
    engines = dict.fromkeys(sides, engine)
    return split(choice, explain([run], CONTRACT), scores, engines, CONTRACT)  # type: ignore[arg-type]


G = RUN.rollout
FAR = {"c": 0.4}


def test_a_healthy_run_has_three_small_edges_that_add_up() -> None:
    done = rescored(RUN, rollout=noisy(G, 1), train=noisy(G, 2))
    assert (done.status, done.exit_code) == ("pass", 0), done.breaches
    record = json.loads(rescored_json(done, "a dump", "a run"), parse_constant=pytest.fail)
    assert "'a run'" in record["next"]
    names = ["decode_vs_prefill", "prefill_vs_train", "train_vs_dump"]
    assert [e.name for e in done.edges] == names
    assert all(e.diagnosis == "numerics" and e.mean.value < 0.03 for e in done.edges)
    assert sum(e.share.value for e in done.edges) == pytest.approx(1.0)
    # The Δ of the edges add up to that of the dump, and k1 is the negative mean of Δ.
    assert sum(e.metrics.k1 for e in done.edges) == pytest.approx(done.own.k1)
    assert done.missing == 0


def test_the_trainers_own_noise_is_the_trainers() -> None:
    run = dataclasses.replace(RUN, train=noisy(G, 5, **FAR))
    done = rescored(run, rollout=noisy(G, 1), train=noisy(G, 2))
    assert done.carrier == "train_vs_dump"
    assert done.exit_code == 1
    assert "of the mismatch lies with the run's trainer" in done.sentence
    assert done.edges[2].share.value > 0.7
    assert "train_vs_dump" in {name for name, _ in done.breaches}


def test_the_rollouts_decode_is_the_decodes() -> None:
    run = dataclasses.replace(RUN, rollout=noisy(G, 5, **FAR))
    done = rescored(run, rollout=noisy(RUN.train, 1), train=noisy(RUN.train, 2))
    assert done.carrier == "decode_vs_prefill"
    assert done.exit_code == 1
    assert "--model m --rollout 'hf:attn=a b' --edges decode_vs_prefill" in done.next


def test_a_path_in_the_advice_stays_what_it_is() -> None:
    run = dataclasses.replace(RUN, rollout=noisy(G, 5, **FAR))
    sides = {"rollout": noisy(RUN.train, 1), "train": noisy(RUN.train, 2)}
    for model in ("/ckpt/RUN/step_1", "/ckpt/DUMP-RUN", "/ckpt/{RUN}/{0}"):
        done = rescored(run, model=model, **sides)
        said = json.loads(rescored_json(done, "a dump", "a run"))["next"]
        assert f"--model {shlex.quote(model)} --rollout" in said


def test_the_engines_kernels_are_the_engines() -> None:
    other = noisy(G, 7, **FAR)
    run = dataclasses.replace(RUN, train=noisy(other, 8))
    done = rescored(run, rollout=noisy(G, 1), train=noisy(other, 2))
    assert done.carrier == "prefill_vs_train"
    assert done.odd is None
    assert done.next.startswith("rlk-align probe {RUN}")


@pytest.mark.parametrize(("side", "other"), [("train", "rollout"), ("rollout", "train")])
def test_an_engine_that_is_off_by_itself_is_named(side: str, other: str) -> None:
    done = rescored(RUN, **{side: noisy(G, 5, **FAR), other: noisy(G, 2)})
    assert done.odd == side
    assert done.carrier == "prefill_vs_train"
    assert done.exit_code == 1


def test_engines_of_another_model_conclude_nothing() -> None:
    other = noisy(G, 7, **FAR)
    done = rescored(RUN, rollout=noisy(other, 1), train=noisy(other, 2))
    assert done.exit_code == 4
    assert "another model" in done.doubts[0]


def test_one_engine_makes_two_edges() -> None:
    run = dataclasses.replace(RUN, train=noisy(G, 5, **FAR))
    done = rescored(run, train=noisy(G, 2))
    assert [e.name for e in done.edges] == ["decode_vs_train", "train_vs_dump"]
    assert done.carrier == "train_vs_dump"
    done = rescored(run, rollout=noisy(G, 2))
    assert [e.name for e in done.edges] == ["decode_vs_prefill", "prefill_vs_dump"]
    assert done.carrier == "prefill_vs_dump"


def test_nothing_scored_again_is_no_pass() -> None:
    done = rescored(RUN, np.ones(RUN.tokens, dtype=bool), train=G)
    assert done.exit_code == 4
    assert done.sentence == "Nothing was scored again."
    json.loads(rescored_json(done, "dump", "run"), parse_constant=pytest.fail)


def test_some_tokens_not_scored_again_are_told() -> None:
    lost = np.random.default_rng(0).random(RUN.tokens) < 0.1
    done = rescored(RUN, lost, train=noisy(G, 2))
    assert done.exit_code == 4
    assert done.missing == int((RUN.compared & lost & (RUN.position > 0)).sum())
    assert done.own.tokens + done.missing == int((RUN.compared & (RUN.position > 0)).sum())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_fails(value: float) -> None:
    scores = noisy(G, 2)
    scores[np.flatnonzero(RUN.compared)[7]] = value
    done = rescored(RUN, train=scores)
    assert done.exit_code == 1
    assert [e.nonfinite for e in done.edges] == [1, 1]
    record = json.loads(rescored_json(done, "dump", "run"), parse_constant=pytest.fail)
    assert {b["limit"] for b in record["breaches"]} >= {"finite"}


def test_values_of_another_position_lead_to_the_bookkeeping() -> None:
    run = dataclasses.replace(RUN, train=np.roll(RUN.train, 1))
    done = rescored(run, train=noisy(G, 2))
    assert done.carrier == "train_vs_dump"
    assert done.edges[1].diagnosis == "misaligned"
    assert "which token index" in done.next
    assert done.sentence.endswith("alone it looks like misaligned.")
