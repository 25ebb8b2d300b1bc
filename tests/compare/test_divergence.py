"""Faults are planted in synthetic traces; who introduced and who inherited is known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import (
    BATCH,
    NAMES,
    SHAPE,
    SITES,
    Values,
    all_cells,
    compared,
    corrupt,
    draw,
    wanted_cells,
    write_trace,
)

from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.results import Comparison, EdgeResult, SiteResult
from rlk_align.trace.reader import Trace

VALUES = draw()
SAMPLED = (1, 4)
"""A row that every site has: sample 1, position 4, whose next token was sampled."""
GRAPH = {s.name: s for s in SITES}


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("module") / "rollout", VALUES)


@pytest.fixture
def edge_of(rollout: Trace, tmp_path: Path) -> Callable[..., EdgeResult]:
    def compare(values: Values, **options: object) -> EdgeResult:
        train = write_trace(tmp_path / "train", values, **options)
        [edge] = compared(rollout, train).edges
        return edge

    return compare


def by_site(edge: EdgeResult) -> dict[str, SiteResult]:
    return {s.site: s for s in edge.sites}


def test_equal_sides_have_no_introducer(edge_of) -> None:
    edge = edge_of(VALUES)
    assert edge.first_bitwise is None
    assert [s.site for s in edge.sites] == NAMES
    assert all(
        (s.differ, s.introduced, s.nonfinite, s.frontier) == (0, 0, 0, []) for s in edge.sites
    )
    assert edge.metrics.max_abs_dlogp == 0
    assert edge.metrics.bit_mismatches == 0
    assert edge.metrics.tokens == BATCH.sampled_tokens
    assert edge.paired_rows == edge.expected_rows
    assert edge.expected_rows == sum(len(wanted_cells(s, False)) for s in SITES)
    assert edge.unpaired == []


@pytest.mark.parametrize("site", NAMES)
def test_a_fault_is_named_at_its_site_and_nowhere_else(edge_of, site: str) -> None:
    values = corrupt(VALUES, site, [SAMPLED])
    edge = edge_of(values)
    first = edge.first_bitwise
    assert (first.site, first.sample, first.position) == (site, *SAMPLED)
    assert (first.layer, first.op) == (GRAPH[site].layer, GRAPH[site].op)
    # Everything before it in execution order is equal, so the last equal site is its neighbour.
    before = NAMES[: NAMES.index(site)]
    assert first.last_equal == (before[-1] if before else None)
    for name, result in by_site(edge).items():
        assert result.introduced == (1 if name == site else 0), name
        cells = wanted_cells(GRAPH[name], False)
        order = all_cells()
        rows = [order.index(c) for c in cells]
        differ = (values[name][rows] != VALUES[name][rows]).any(dim=1)
        assert result.differ == int(differ.sum()), name
        assert result.first_introduced == (SAMPLED if name == site else None)


def test_figures_are_those_of_the_differing_rows(edge_of) -> None:
    values = corrupt(VALUES, "layers.1.o_proj", [(0, 2), (2, 5)])
    result = by_site(edge_of(values))["layers.1.o_proj"]
    order = all_cells()
    rows = [order.index(c) for c in ((0, 2), (2, 5))]
    a, b = (v["layers.1.o_proj"][rows].double() for v in (VALUES, values))
    error = (b - a).norm(dim=1)
    relative = error / torch.maximum(a.norm(dim=1), b.norm(dim=1))
    assert result.valued_rows == result.introduced == result.differ == 2
    assert result.rows == len(order)
    assert result.max_abs == (b - a).abs().max().item()
    assert result.elements_differ == int((a != b).sum())
    assert result.max_rel_l2 == pytest.approx(relative.max().item(), rel=1e-12)
    assert result.mean_rel_l2 == pytest.approx(relative.mean().item(), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(a, b)
    assert result.min_cosine == pytest.approx(cosine.min().item(), rel=1e-9)
    magnitudes = torch.maximum(a.abs(), b.abs()).flatten().tolist()
    points = set(zip(magnitudes, (b - a).abs().flatten().tolist(), strict=True))
    assert result.frontier
    assert set(result.frontier) <= points


def test_log_prob_metrics_are_of_the_pass_pair(edge_of) -> None:
    values = corrupt(VALUES, "logprob", [SAMPLED, (2, 0)])
    metrics = edge_of(values).metrics
    rows = [all_cells().index(c) for c in wanted_cells(GRAPH["logprob"], False)]
    delta = (values["logprob"][rows].double() - VALUES["logprob"][rows].double()).abs()
    assert metrics.bit_mismatches == 2
    assert metrics.max_abs_dlogp == delta.max().item()
    assert metrics.mean_abs_dlogp == pytest.approx(delta.mean().item(), rel=1e-12)


@pytest.mark.parametrize("source", ["layers.0.k_rope", "layers.0.v_proj"])
def test_attention_reads_earlier_keys_and_values(edge_of, source: str) -> None:
    edge = edge_of(corrupt(VALUES, source, [(1, 2)]))
    sites = by_site(edge)
    assert edge.first_bitwise.site == source
    later = len(BATCH.samples[1].ids) - 2
    assert sites["layers.0.attn"].differ == later
    assert sites["layers.0.attn"].introduced == 0


@pytest.mark.parametrize("source", ["layers.0.k_rope", "layers.0.v_proj"])
@pytest.mark.parametrize("victim", [(1, 1), (0, 5), (2, 3)])
def test_a_later_key_or_another_sample_explains_nothing(
    edge_of, source: str, victim: tuple[int, int]
) -> None:
    """A leak past the causal mask, or across packed sequences, is the attention's own fault."""
    values = corrupt(VALUES, source, [(1, 2)])
    values = corrupt(values, "layers.0.attn", [victim])
    sites = by_site(edge_of(values))
    assert sites["layers.0.attn"].introduced == 1
    assert sites["layers.0.attn"].first_introduced == victim
    assert sites[source].introduced == 1


def test_a_query_of_another_row_explains_nothing(edge_of) -> None:
    values = corrupt(corrupt(VALUES, "layers.1.q_rope", [(0, 3)]), "layers.1.attn", [(0, 4)])
    sites = by_site(edge_of(values))
    assert sites["layers.1.attn"].differ == 2
    assert sites["layers.1.attn"].introduced == 1
    assert sites["layers.1.attn"].first_introduced == (0, 4)


def test_two_faults_are_both_introducers_and_the_earlier_is_first(edge_of) -> None:
    values = corrupt(corrupt(VALUES, "layers.1.act", [(0, 0)]), "layers.0.up_proj", [(2, 6)])
    edge = edge_of(values)
    assert edge.first_bitwise.site == "layers.0.up_proj"
    introduced = {s.site: s.introduced for s in edge.sites if s.introduced}
    assert introduced == {"layers.0.up_proj": 1, "layers.1.act": 1}


def test_a_residual_inherits_from_either_input(edge_of) -> None:
    # The stream of layer 0 reaches layer 1 around attention, too.
    values = corrupt(VALUES, "layers.0.mlp_residual", [(0, 6)])
    edge = edge_of(values)
    assert {s.site for s in edge.sites if s.introduced} == {"layers.0.mlp_residual"}


@pytest.mark.parametrize("missing", [n for n in NAMES if n not in ("logprob", "embed")])
def test_a_missing_site_is_looked_through(edge_of, missing: str) -> None:
    """Its own inputs stand for it: what reads it does not inherit from nowhere."""
    values = corrupt(VALUES, missing, [SAMPLED])
    changed = {n for n in NAMES if not torch.equal(values[n], VALUES[n])} - {missing}
    readers = {
        s.name
        for s in SITES
        if missing in (inputs := {*s.inputs, *s.prefix_inputs}) and not inputs & changed
    }
    # The missing site's inputs are equal, so the region from those on introduced it.
    edge = edge_of(values, without={missing: None})
    sites = by_site(edge)
    assert missing not in sites
    named = {name for name in sites if sites[name].introduced}
    assert readers
    assert named == readers
    assert edge.first_bitwise.site == min(readers, key=NAMES.index)
    assert [site for site, *_ in edge.unpaired] == [missing]


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("layers.0.attn_norm", ["layers.0.q_rope"]),
        ("layers.0.q_proj", ["layers.0.q_rope"]),
        ("layers.0.k_proj", ["layers.0.k_rope"]),
        ("layers.1.gate_proj", ["layers.1.act"]),
        ("layers.1.act", ["layers.1.down_proj", "layers.1.mlp_residual", "final_norm"]),
        ("final_norm", ["logits"]),
        ("embed", ["layers.0.attn_norm", "layers.0.v_proj"]),
    ],
)
def test_a_difference_before_a_missing_site_is_inherited_through_it(
    edge_of, source: str, missing: list[str]
) -> None:
    edge = edge_of(corrupt(VALUES, source, [SAMPLED]), without=dict.fromkeys(missing))
    assert {s.site for s in edge.sites if s.introduced} == {source}


def test_rows_missing_of_an_input_are_not_taken_for_equal(edge_of) -> None:
    values = corrupt(VALUES, "layers.0.gate_proj", [(0, 1)])
    edge = edge_of(values, without={"layers.0.gate_proj": [(0, 1)]})
    assert by_site(edge)["layers.0.act"].introduced == 0
    assert by_site(edge)["layers.0.gate_proj"].rows == len(all_cells()) - 1
    assert edge.paired_rows == edge.expected_rows - 1


def test_a_row_that_its_engine_does_not_repeat_is_no_introducer(edge_of) -> None:
    values = corrupt(corrupt(VALUES, "layers.0.act", [(0, 1)]), "layers.1.act", [(2, 2)])
    repeat = corrupt(values, "layers.0.act", [(0, 1)])
    edge = edge_of(values, repeat=repeat)
    sites = by_site(edge)
    assert (sites["layers.0.act"].introduced, sites["layers.0.act"].noisy) == (0, 1)
    assert edge.first_bitwise.site == "layers.1.act"


def test_noise_of_the_first_side_counts_too(tmp_path: Path) -> None:
    values = corrupt(VALUES, "layers.0.act", [(0, 1)])
    rollout = write_trace(tmp_path / "a", VALUES, repeat=corrupt(VALUES, "layers.0.act", [(0, 1)]))
    [edge] = compared(rollout, write_trace(tmp_path / "b", values)).edges
    assert by_site(edge)["layers.0.act"].noisy == 1
    assert edge.first_bitwise is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("both", [True, False])
def test_nan_and_inf_are_counted_even_where_both_sides_agree(
    rollout: Trace, tmp_path: Path, bad: float, both: bool
) -> None:
    def poison(row: torch.Tensor) -> torch.Tensor:
        row = row.clone()
        row[:2] = bad
        return row

    values = corrupt(VALUES, "layers.1.down_proj", [(2, 3)], change=poison)
    first = write_trace(tmp_path / "a", values) if both else rollout
    [edge] = compared(first, write_trace(tmp_path / "b", values)).edges
    result = by_site(edge)["layers.1.down_proj"]
    assert result.nonfinite == (4 if both else 2)
    assert result.first_nonfinite == (2, 3)
    assert {s.site for s in edge.sites if s.nonfinite} == {"layers.1.down_proj"}
    assert (edge.first_bitwise is None) == both


def test_values_that_were_not_kept_leave_the_proof(edge_of) -> None:
    """Bitwise needs digests only; figures are of the rows with values."""

    def keep(site: str, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        return (sample != 1) | (site == "logprob")

    values = corrupt(VALUES, "layers.0.up_proj", [SAMPLED, (2, 2)])
    edge = edge_of(values, keep=keep)
    result = by_site(edge)["layers.0.up_proj"]
    assert (result.differ, result.introduced, result.valued_rows) == (2, 2, 1)
    first = edge.first_bitwise
    assert (first.site, first.sample, first.position) == ("layers.0.up_proj", *SAMPLED)


def test_an_operator_of_another_dtype_but_the_same_values_is_equal(edge_of) -> None:
    values = dict(VALUES)
    values["layers.0.act"] = VALUES["layers.0.act"].float()
    assert edge_of(values).first_bitwise is None


def test_an_operator_of_another_dtype_is_compared_by_value(edge_of) -> None:
    values = dict(VALUES)
    values["layers.0.act"] = VALUES["layers.0.act"].float()
    values["layers.0.act"][3, 1] += 2.0**-20
    edge = edge_of(values)
    first = edge.first_bitwise
    assert (first.site, first.sample, first.position) == ("layers.0.act", *all_cells()[3])
    assert by_site(edge)["layers.0.act"].introduced == 1


def test_an_operator_of_another_width_is_a_result_and_no_crash(edge_of) -> None:
    values = dict(VALUES)
    values["layers.0.act"] = torch.nn.functional.pad(VALUES["layers.0.act"], (0, 5))
    edge = edge_of(values)
    widths = [reason for site, reason, _ in edge.unpaired if site == "layers.0.act"]
    assert widths or by_site(edge)["layers.0.act"].introduced == len(all_cells())


def test_no_log_prob_in_common_is_a_result_and_no_crash(edge_of, tmp_path: Path) -> None:
    cells = wanted_cells(GRAPH["logprob"], False)
    first = write_trace(tmp_path / "a", VALUES, without={"logprob": cells[:5]})
    second = write_trace(tmp_path / "b", VALUES, without={"logprob": cells[5:]})
    [edge] = compared(first, second).edges
    assert edge.metrics.tokens == 0
    assert np.isnan(edge.metrics.max_abs_dlogp)
    assert by_site(edge)["logprob"].rows == 0


def test_decode_and_prefill_are_compared_without_the_last_token(tmp_path: Path) -> None:
    rollout = write_trace(tmp_path / "a", VALUES, passes=("decode", "prefill"))
    # The last sampled token never enters a decode: a fault there is nobody's.
    last = (1, len(BATCH.samples[1].ids) - 1)
    train = write_trace(tmp_path / "b", corrupt(VALUES, "layers.0.act", [last]))
    edges = compared(
        rollout, train, ("decode_vs_prefill", "prefill_vs_train", "decode_vs_train")
    ).edges
    named = {e.name: e.first_bitwise and e.first_bitwise.site for e in edges}
    assert named == {
        "decode_vs_prefill": None,
        "prefill_vs_train": "layers.0.act",
        "decode_vs_train": None,
    }
    for edge in edges:
        assert edge.paired_rows == edge.expected_rows
        decode = "decode" in edge.name
        assert edge.expected_rows == sum(len(wanted_cells(s, decode)) for s in SITES)


OTHER_TOKENS = TokenBatch(
    (BATCH.samples[0], Sample("b", (1, 3), (2, 9, 15, 7, 6)), BATCH.samples[2])
)


def across_tokens(tmp_path: Path, values: Values) -> Comparison:
    rollout = write_trace(tmp_path / "a", VALUES)
    train = write_trace(tmp_path / "b", values, batch=OTHER_TOKENS)
    return compared(rollout, train, allowed=("tokens",))


def test_other_tokens_are_the_cause_where_they_are_allowed(tmp_path: Path) -> None:
    """Sample 1 has another id at position 4: embed differs there and log-prob before it."""
    values = corrupt(VALUES, "embed", [(1, 4)])
    row = all_cells().index((1, 3))
    values["logprob"][row] -= 0.5
    comparison = across_tokens(tmp_path, values)
    assert [m.kind for m in comparison.mismatches] == ["tokens"]
    assert not comparison.stopped
    [edge] = comparison.edges
    assert edge.first_bitwise is None
    assert by_site(edge)["embed"].differ == 1
    assert by_site(edge)["logprob"].differ >= 2


def test_a_fault_beside_other_tokens_is_still_named(tmp_path: Path) -> None:
    values = corrupt(corrupt(VALUES, "embed", [(1, 4)]), "layers.0.q_proj", [(1, 3)])
    [edge] = across_tokens(tmp_path, values).edges
    first = edge.first_bitwise
    assert (first.site, first.sample, first.position) == ("layers.0.q_proj", 1, 3)


def test_an_embedding_that_differs_for_the_same_token_is_an_introducer(tmp_path: Path) -> None:
    values = corrupt(VALUES, "embed", [(1, 4), (1, 5)])
    [edge] = across_tokens(tmp_path, values).edges
    first = edge.first_bitwise
    assert (first.site, first.sample, first.position) == ("embed", 1, 5)


def test_a_layer_that_only_the_other_side_has_is_not_passed_over(tmp_path: Path) -> None:
    deeper = {f"layers.2.{s.op}": VALUES[s.name].clone() for s in SITES if s.layer == 1}
    shape = SHAPE.__class__(**{f: getattr(SHAPE, f) for f in SHAPE.__slots__} | {"layers": 3})
    from rlk_align.model.sites import model_sites

    rollout = write_trace(tmp_path / "a", VALUES)
    record = {"shape": shape, "attributes": {"layers": 3, "temperature": 1.0}}
    train = write_trace(tmp_path / "b", VALUES | deeper, record=record, sites=model_sites(shape))
    comparison = compared(rollout, train, allowed=("attributes",))
    [edge] = comparison.edges
    assert any(site.startswith("layers.2.") for site, *_ in edge.unpaired)
