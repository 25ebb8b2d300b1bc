"""Runs with too little information: few steps, few tokens, no dtype, or no counts."""

import dataclasses

import numpy as np
import pytest
from explained import CONTRACT, explained
from simulate_dumps import Dump, faulty, healthy


@pytest.mark.parametrize(
    ("rollout", "train", "wanted"),
    [
        (None, None, "bfloat16"),
        (None, "float32", "bfloat16"),
        ("float16", "float32", "float16"),
        ("float32", "float32", "float32"),
        ("fp8_e4m3", "float32", "bfloat16"),
    ],
)
def test_the_lower_precision_gives_the_limit(
    rollout: str | None, train: str | None, wanted: str
) -> None:
    run = healthy(0, 2_000)
    sides = {"rollout_dtypes": [rollout] * len(run), "train_dtypes": [train] * len(run)}
    assert explained(dataclasses.replace(run, **sides)).dtype == wanted


def test_one_sequence_without_a_dtype_counts_as_bfloat16() -> None:
    run = healthy(0, 2_000, "float32")
    dtypes = ["float32"] * (len(run) - 1) + [None]
    assert explained(dataclasses.replace(run, rollout_dtypes=dtypes)).dtype == "bfloat16"


def test_one_step_passes_and_says_that_no_trend_was_tested() -> None:
    found = explained(Dump(0, 2_000, steps=1).sequences_of())
    assert found.status == "pass"
    said = {x.name: x.why for x in found.untested}
    assert "1 step, and a trend needs 5" in said["stale-weights"]
    assert not any(x.suspected for x in found.untested)


@pytest.mark.parametrize("name", ["never synced", "routes flip"])
def test_a_fault_in_few_tokens_does_not_pass(name: str) -> None:
    for seed in range(10):
        assert explained(faulty(name, seed, 2_000)).status != "pass"


def test_enough_tokens_and_all_fields_leave_nothing_untested() -> None:
    dump = Dump(0, 200_000)
    dump.packs = np.arange(dump.sequences) % 4
    dump.cached = np.zeros(dump.sequences, dtype=np.int64)
    assert explained(dump.sequences_of()).untested == []


def test_a_broken_prompt_of_one_step_may_be_a_stale_cache() -> None:
    dump = Dump(1, 20_000, steps=1)
    dump.extra[(dump.groups == 1)[dump.sequence]] = 30.0
    run = dump.sequences_of()
    found = explained(run).diagnoses[0]
    assert found.name == "decode-state"
    assert "prefix cache of older weights" in found.why
    counted = dataclasses.replace(run, cached_tokens=np.zeros(len(run), dtype=np.int64))
    found = explained(counted).diagnoses[0]
    assert found.name == "decode-state"
    assert "prefix cache" not in found.why


def test_a_dump_without_groups_names_no_prompt() -> None:
    run = faulty("decode broken", 0, 20_000)
    found = explained(dataclasses.replace(run, groups=[None] * len(run))).diagnoses[0]
    assert found.name == "decode-state"
    assert "names no groups" in found.why


@pytest.mark.parametrize(
    ("fault", "named"),
    [("quantised", []), ("T on the rollout only", []), ("-9999 for missing", ["missing"])],
)
def test_few_tokens_name_bookkeeping_alone(fault: str, named: list[str]) -> None:
    run = faulty(fault, 0, 2_000, 0.1 if fault.startswith("-") else None).take(np.arange(5))
    assert 0 < run.compared.sum() < CONTRACT.min_tokens
    found = explained(run)
    assert found.status == "inconclusive"
    assert [d.name for d in found.diagnoses] == named
