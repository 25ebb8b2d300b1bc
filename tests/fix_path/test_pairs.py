"""Two engines on one model, for the pairs of `engine_pairs.py`. With the kernels no bit differs, at
any site of any row, and every token goes to the same experts. Without the kernels the engines
drift, and a healthy pair raises no alarm.

RLK_PAIRS=FILE.jsonl collects what each comparison found, for the reports.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, capture_of, write_few_prompts
from engine_pairs import DEFAULT, FACTS, MODELS, STRETCHED_FROM, WHOLE, Model, Pair

from rlk_align.model.prompts import TokenBatch
from rlk_align.results import Comparison


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.whole_matrix) for n in WHOLE],
)
def test_a_pair(cli: Cli, folder: Path, name: str) -> None:
    pair = WHOLE[name]
    contract = ("--contract", "bitwise") if pair.kernels == "rlk" else ()
    command = pair.command(folder, write_few_prompts(folder / "few.jsonl"))
    done = cli(*command, *contract)
    verdict = done.verdict
    assert verdict is not None, done.out + done.err
    if record := os.environ.get("RLK_PAIRS"):
        with Path(record).open("a") as file:
            said = {name: verdict[name] for name in ("status", "edges", "coverage")}
            file.write(json.dumps({"pair": pair.id, "first": done.first} | said) + "\n")
    assert verdict["dtype"] == pair.dtype
    assert verdict["precheck"]["mismatches"] == []
    assert verdict["controls"]["observer"] == "bitwise"
    assert verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
    assert set(verdict["edges"]) == {"decode_vs_prefill", "prefill_vs_train", "decode_vs_train"}
    assert all(edge["tokens"] == verdict["tokens"] > 40 for edge in verdict["edges"].values())
    captures = [capture_of(folder / "run", role) for role in ("rollout", "train")]
    longest = max(
        len(s.ids) for s in TokenBatch.load(captures[0].folder / "tokens.parquet").samples
    )
    assert longest > 3 * STRETCHED_FROM
    if pair.kernels == "rlk":
        assert all(set(capture.record.kernels.values()) == {"torch"} for capture in captures)
        check_equal(done, verdict, MODELS[pair.model])
    else:
        assert all(capture.record.kernels == {} for capture in captures)
        check_healthy(done, verdict, pair)
        if pair.model == "embedded" and pair.engines[0] == "vllm" and pair.drifts:
            comparison = Comparison.model_validate_json(
                (folder / "run/comparison.json").read_text()
            )
            (edge,) = (e for e in comparison.edges if e.name == "prefill_vs_train")
            introducing = {site.op for site in edge.sites if site.introduced}
            assert introducing <= FACTS[pair.engines[1]].other_rounding


def check_equal(done: Outcome, verdict: dict[str, Any], model: Model) -> None:
    assert done.code == 0, done.out + done.err
    assert done.first is None
    for edge in verdict["edges"].values():
        assert edge["bit_mismatches"] == 0
        assert edge["max_abs_dlogp"] == 0.0
        assert edge["ratio_mean"] == edge["ratio_max"] == 1.0
    coverage = verdict["coverage"]
    assert coverage["paired"] == coverage["expected"] > 5000
    assert coverage["unpaired"] == []
    assert set(verdict.get("routing", {})) == (set(verdict["edges"]) if model.sparse else set())
    for routing in verdict.get("routing", {}).values():
        assert routing["tokens"] > 100
        assert routing["flipped_tokens"] == 0


def check_healthy(done: Outcome, verdict: dict[str, Any], pair: Pair) -> None:
    assert done.code == 0, done.out + done.err
    assert verdict["breaches"] == []
    divergence = verdict["divergences"]["prefill_vs_train"]
    assert divergence["over_budget"] == []
    edge = verdict["edges"]["prefill_vs_train"]
    if pair.drifts:
        assert done.first is not None
        assert edge["bit_mismatches"] > 0
    coverage = verdict["coverage"]
    assert coverage["fraction"] == 1
    unpaired = {site["site"].rpartition(".")[2] for site in coverage["unpaired"]}
    if not MODELS[pair.model].sparse:
        assert unpaired == set()
        return
    assert unpaired == set().union(*(FACTS[engine].hidden for engine in pair.engines))
    assert "routing (prefill_vs_train): " in done.out
    routing = verdict["routing"]["prefill_vs_train"]
    assert routing["layers"]
    assert all(layer["largest_gap"] <= 5 for layer in routing["layers"])
    assert routing["flipped_tokens"] < 0.1 * routing["tokens"]


def test_the_default_pairs_cover_every_two_values() -> None:
    """The axes of `Pair.goals`; the whole matrix is far larger."""
    default = [WHOLE[name] for name in DEFAULT]
    reached = frozenset().union(*(pair.goals for pair in default))
    for name, pair in WHOLE.items():
        assert pair.goals <= reached, name
    assert {pair.model for pair in default} == MODELS.keys()
    assert len(default) < len(WHOLE) / 15
