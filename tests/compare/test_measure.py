"""From two traces to a Comparison: the precheck stops it, controls qualify it."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import (
    BATCH,
    NAMES,
    SITES,
    all_cells,
    compared,
    corrupt,
    draw,
    keep_logprobs,
    seal,
    wanted_cells,
    write_pass,
    write_trace,
)

from rlk_align.compare.controls import is_noise
from rlk_align.errors import CorruptTrace
from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import judge
from rlk_align.model.edges import EDGES, passes_for
from rlk_align.model.prompts import TokenBatch
from rlk_align.report.verdict_json import verdict_json
from rlk_align.results import Comparison, GraphReplays
from rlk_align.trace.reader import Trace

VALUES = draw()
CELL = (1, 4)


def pair_of(tmp_path: Path, judged=("prefill_vs_train",), **rollout_options) -> Comparison:
    first = write_trace(tmp_path / "a", VALUES, **rollout_options)
    return compared(first, write_trace(tmp_path / "b", VALUES), judged)


def nudged(cells: list[tuple[int, int]], by: float) -> dict[str, torch.Tensor]:
    values = {n: v.clone() for n, v in VALUES.items()}
    for cell in cells:
        values["logprob"][all_cells().index(cell)] += by
    return values


def test_a_comparison_says_what_was_compared(tmp_path: Path) -> None:
    comparison = pair_of(tmp_path)
    assert comparison.tokens == BATCH.sampled_tokens
    assert comparison.dtype == "bfloat16"
    assert list(comparison.engines) == ["rollout", "train"]
    assert comparison.judged == ["prefill_vs_train"]
    assert comparison.missing_edges == {}
    assert comparison.production is None
    assert comparison.controls.observer == "bitwise"
    assert comparison.controls.noise == {"rollout": None, "train": None}
    text = comparison.model_dump_json()
    assert Comparison.model_validate_json(text) == comparison


def test_log_probs_that_the_mask_leaves_out_do_not_count(tmp_path: Path) -> None:
    """The first token of each response is a tool's, and far off; the others are equal."""
    samples = [
        replace(s, counted=tuple(k > 0 for k in range(len(s.response_ids)))) for s in BATCH.samples
    ]
    masked = TokenBatch(tuple(samples))
    first = [(i, len(s.prompt_ids) - 1) for i, s in enumerate(BATCH.samples)]
    metrics = {}
    for name, batch in (("all", BATCH), ("masked", masked)):
        a = write_trace(tmp_path / f"{name}-a", VALUES, batch=batch)
        b = write_trace(tmp_path / f"{name}-b", nudged(first, 0.5), batch=batch)
        comparison = compared(a, b)
        metrics[name] = comparison.edges[0].metrics
        assert comparison.tokens == metrics[name].tokens
    assert metrics["all"].max_abs_dlogp == pytest.approx(0.5, abs=1e-6)
    assert metrics["masked"].max_abs_dlogp == 0
    assert metrics["masked"].tokens == BATCH.sampled_tokens - len(BATCH.samples)


def test_the_lower_precision_names_the_dtype(tmp_path: Path) -> None:
    first = write_trace(tmp_path / "a", VALUES, record={"dtype": "float32"})
    second = write_trace(tmp_path / "b", VALUES, record={"dtype": "float16"})
    assert compared(first, second).dtype == "float16"


def test_a_mismatch_stops_it_before_any_number(tmp_path: Path) -> None:
    first = write_trace(tmp_path / "a", VALUES)
    second = write_trace(tmp_path / "b", VALUES, weights={"embed": torch.zeros(16, 8)})
    comparison = compared(first, second)
    assert comparison.stopped
    assert [(m.kind, m.name) for m in comparison.mismatches] == [("weights", "embed")]
    assert (comparison.edges, comparison.controls) == ([], None)
    wrong = compared(first, second, allowed=("tokens", "attributes"))
    assert wrong.stopped
    allowed = compared(first, second, allowed=("weights",))
    assert not allowed.stopped
    assert len(allowed.edges) == 1
    assert allowed.mismatches == comparison.mismatches


def test_an_edge_without_its_pass_is_missing_with_its_reason(tmp_path: Path) -> None:
    comparison = pair_of(tmp_path, EDGES)
    assert set(comparison.missing_edges) == {"decode_vs_prefill", "decode_vs_train"}
    assert all("decode" in why for why in comparison.missing_edges.values())
    assert [e.name for e in comparison.edges] == ["prefill_vs_train"]


def test_edges_need_their_passes() -> None:
    assert passes_for(EDGES, "rollout") == ("decode", "prefill")
    assert passes_for(EDGES, "train") == ("prefill",)
    assert passes_for(["decode_vs_train"], "rollout") == ("decode",)
    assert passes_for(["prefill_vs_train"], "rollout") == ("prefill",)
    assert passes_for(["decode_vs_prefill"], "train") == ()


def test_taps_that_move_log_probs_are_a_violation(tmp_path: Path) -> None:
    comparison = pair_of(tmp_path, untapped=nudged([CELL], 0.25))
    assert comparison.controls.observer == "violated"
    [detail] = comparison.controls.observer_detail
    assert "rollout prefill" in detail
    assert "0.25" in detail


def test_taps_that_move_what_a_stage_sends_on_are_a_violation(tmp_path: Path) -> None:
    """The log-probs are equal: they were computed from what the stage sent while it was tapped."""
    sent = "layers.0.mlp_residual"
    moved = VALUES | {sent: VALUES[sent] + 1}
    sites = ("logprob", sent)
    comparison = pair_of(tmp_path / "moved", untapped=moved, untapped_sites=sites)
    assert comparison.controls.observer == "violated"
    [detail] = comparison.controls.observer_detail
    assert f"{sent} with and without taps differs" in detail
    comparison = pair_of(tmp_path / "same", untapped_sites=sites)
    assert comparison.controls.observer == "bitwise"


def test_taps_within_the_noise_are_no_violation(tmp_path: Path) -> None:
    comparison = pair_of(tmp_path, untapped=nudged([CELL], 0.125), repeat=nudged([CELL], 0.25))
    assert comparison.controls.observer == "within noise floor"
    noise = comparison.controls.noise["rollout"]
    assert noise.max_abs_dlogp == pytest.approx(0.25, abs=1e-6)
    assert noise.mean_abs_dlogp == pytest.approx(0.25 / BATCH.sampled_tokens, abs=1e-6)
    assert (noise.rows, noise.first_site, noise.passname) == (1, "logprob", "prefill")
    assert comparison.controls.noise["train"] is None


@pytest.mark.parametrize(("by", "want"), [(3.9, "within noise floor"), (4.1, "violated")])
def test_taps_beyond_the_noise_are_a_violation(tmp_path: Path, by: float, want: str) -> None:
    """Two draws of the same noise differ: taps are blamed for clearly more alone."""
    comparison = pair_of(tmp_path, untapped=nudged([CELL], by), repeat=nudged([CELL], 0.125))
    assert comparison.controls.observer == want


def test_two_draws_of_a_noise_are_told_from_a_shift_of_most_tokens() -> None:
    """Heavy tails, another scale for every token, as an engine's noise has them."""
    draw = np.random.default_rng(7)
    scale = np.exp(draw.standard_normal(100))

    def noise() -> np.ndarray:
        return np.abs(scale * draw.standard_t(4, 100))

    assert all(is_noise(noise(), noise()) for _ in range(2000))
    assert not any(is_noise(16 * noise(), noise()) for _ in range(200))
    assert not is_noise(np.full(100, np.nan), noise())
    assert not is_noise(noise(), noise()[:50])
    assert not is_noise(noise(), None)


def test_a_nan_is_no_small_shift(tmp_path: Path) -> None:
    bad = nudged([CELL], float("nan"))
    comparison = pair_of(tmp_path, untapped=bad, repeat=nudged([CELL], 0.25))
    assert comparison.controls.observer == "violated"


def test_a_fault_in_a_row_without_values_is_seen_by_its_largest_entry(tmp_path: Path) -> None:
    """Statistics are of every row: an entry larger by so much is off by as much at least."""
    site = "layers.0.o_proj"
    faulty = corrupt(VALUES, site, [CELL], change=lambda row: row * 8)

    def few(name: str, sample, position):
        return keep_logprobs(name, sample, position) | (sample != CELL[0])

    traces = [
        write_trace(tmp_path / name, values, keep=few)
        for name, values in (("a", VALUES), ("b", faulty))
    ]
    (edge,) = compared(*traces).edges
    (found,) = [s for s in edge.sites if s.site == site]
    assert (found.introduced, found.introduced_valued, found.valued_rows) == (1, 0, 0)
    row = VALUES[site][all_cells().index(CELL)].double().abs().max().item()
    ((magnitude, error),) = found.frontier
    assert magnitude == pytest.approx(8 * row)
    assert error == pytest.approx(7 * row)


def test_noise_names_its_first_site(tmp_path: Path) -> None:
    repeat = corrupt(VALUES, "layers.0.up_proj", [CELL])
    noise = pair_of(tmp_path, repeat=repeat).controls.noise["rollout"]
    assert noise.first_site == "layers.0.up_proj"
    rows = 0
    for site in SITES:
        index = [all_cells().index(c) for c in wanted_cells(site, False)]
        rows += int((repeat[site.name][index] != VALUES[site.name][index]).any(dim=1).sum())
    assert noise.rows == rows


def test_the_worst_noise_of_several_passes_is_the_floor(tmp_path: Path) -> None:
    """Decode repeats within 0.125 and prefill within 0.25: the larger is what is not repeated."""
    rollout = write_trace(
        tmp_path / "a", VALUES, passes=("decode", "prefill"), repeat=nudged([CELL], 0.125)
    )
    folder = tmp_path / "a" / "prefill.repeat"
    shutil.rmtree(folder)
    write_pass(folder, nudged([CELL], 0.25), keep=keep_logprobs, statistics=False)
    train = write_trace(tmp_path / "b", VALUES)
    controls = compared(rollout, train, EDGES).controls
    assert controls.noise["rollout"].max_abs_dlogp == pytest.approx(0.25, abs=1e-6)


def test_a_repeat_that_lacks_rows_is_noise(tmp_path: Path) -> None:
    rollout = write_trace(tmp_path / "a", VALUES, controls=("untapped",))
    folder = tmp_path / "a" / "prefill.repeat"
    without = {"layers.1.act": [CELL]}
    write_pass(folder, VALUES, keep=keep_logprobs, statistics=False, without=without)
    seal(rollout.folder)
    rollout = Trace(rollout.folder)
    controls = compared(rollout, write_trace(tmp_path / "b", VALUES)).controls
    assert controls.noise["rollout"].rows == 1
    assert controls.noise["rollout"].first_site == "layers.1.act"


def test_an_observer_that_was_not_checked_is_a_violation(tmp_path: Path) -> None:
    comparison = pair_of(tmp_path, controls=("repeat",))
    assert comparison.controls.observer == "violated"
    assert "no pass without taps" in comparison.controls.observer_detail[0]


def test_noise_that_was_not_measured_is_not_called_bitwise(tmp_path: Path) -> None:
    """Nothing is known of an engine that was not run twice."""
    comparison = pair_of(tmp_path, controls=("untapped",))
    floor = verdict_json(judge(comparison, load_contract("bitwise", "bfloat16")))["controls"]
    assert floor["noise_floor"]["train"] == "bitwise"
    assert floor["noise_floor"]["rollout"] != "bitwise"


def test_an_untapped_pass_with_other_rows_is_a_violation(tmp_path: Path) -> None:
    rollout = write_trace(tmp_path / "a", VALUES, controls=("repeat",))
    logprob = [s for s in SITES if s.op == "logprob"]
    folder = tmp_path / "a" / "prefill.untapped"
    control = {"sites": logprob, "keep": keep_logprobs, "statistics": False}
    write_pass(folder, VALUES, without={"logprob": [CELL]}, **control)
    controls = compared(rollout, write_trace(tmp_path / "b", VALUES)).controls
    assert controls.observer == "violated"


def test_production_is_measured_against_the_observed_prefill(tmp_path: Path) -> None:
    comparison = pair_of(tmp_path, production=nudged([CELL], 0.5))
    assert comparison.production.tokens == BATCH.sampled_tokens
    assert comparison.production.max_abs_dlogp == pytest.approx(0.5, abs=1e-6)
    assert comparison.production.bit_mismatches == 1
    # Δ = the observed mode minus production.
    assert comparison.production.k1 == pytest.approx(0.5 / BATCH.sampled_tokens, abs=1e-6)


def test_each_pass_of_production_is_told_of(tmp_path: Path) -> None:
    """Of both the log-probs count together; a decode that parts is compared up to there."""
    passes = ("decode", "prefill")
    first = write_trace(tmp_path / "a", VALUES, passes=passes, production=nudged([CELL], 0.5))
    graphs = GraphReplays(steps=9, replayed_steps=8, replays={"full": 8}, captured={"full": 3})
    logprob = {"sites": [s for s in SITES if s.op == "logprob"], "statistics": False}
    parted = {"logprob": [(1, 4), (1, 5)]}
    write_pass(
        tmp_path / "a/decode.production", VALUES, decode=True, without=parted,
        graphs=graphs, parted=[(1, 4)], **logprob,
    )  # fmt: skip
    seal(tmp_path / "a")
    found = compared(Trace(first.folder), write_trace(tmp_path / "b", VALUES, passes=passes))
    sampled = BATCH.sampled_tokens
    assert found.production.tokens == 2 * sampled - 2
    assert found.production.bit_mismatches == 1
    decode, prefill = found.production_passes["decode"], found.production_passes["prefill"]
    assert (decode.metrics.tokens, decode.expected, decode.replays) == (sampled - 2, sampled, 8)
    assert decode.parted == [(1, 4)]
    assert (prefill.metrics.bit_mismatches, prefill.replays, prefill.graphs) == (1, 0, None)


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("name", ["prefill", "prefill.repeat", "prefill.untapped"])
@pytest.mark.parametrize("file", ["rows.parquet", "values-00000.safetensors"])
def test_a_flipped_bit_of_any_pass_that_is_read_is_no_result(
    tmp_path: Path, side: str, name: str, file: str
) -> None:
    # Controls that differ, so that their values are read.
    other = {"untapped": nudged([CELL], 0.125), "repeat": nudged([CELL], 0.25)}
    traces = [write_trace(tmp_path / s, VALUES, **other) for s in ("a", "b")]
    path = tmp_path / side / name / file
    data = bytearray(path.read_bytes())
    at = len(data) // 2 if file == "rows.parquet" else len(data) - 2
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptTrace, match=file):
        compared(*traces)


def test_a_flipped_bit_of_the_production_pass_is_no_result(tmp_path: Path) -> None:
    first = write_trace(tmp_path / "a", VALUES, production=VALUES)
    path = tmp_path / "a" / "prefill.production" / "values-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptTrace, match="values"):
        compared(first, write_trace(tmp_path / "b", VALUES))


def test_every_site_of_the_shape_is_walked(tmp_path: Path) -> None:
    [edge] = pair_of(tmp_path).edges
    assert [s.site for s in edge.sites] == NAMES
