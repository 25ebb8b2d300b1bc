"""Weights that differ: which slices, whose ranks, and what lies there instead."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from synthetic import SHAPE, draw, write_trace

from rlk_align.compare.parity_weights import cast_sides, check_weights
from rlk_align.engines.common import parameters as live
from rlk_align.engines.common.parameters import LiveParameter, Shard, even_shards, record_parameter
from rlk_align.errors import ModelError
from rlk_align.report.words import mismatch_words
from rlk_align.results import Mismatch
from rlk_align.trace.reader import Trace
from rlk_align.trace.tables import WEIGHTS_SCHEMA

HEAD = SHAPE.head_dim
VALUES = draw()


def weight(rows: int = 16, columns: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def trace(folder: Path, *parameters: LiveParameter) -> Trace:
    found = write_trace(folder, VALUES)
    records = [record_parameter(p) for p in parameters]
    columns = {c: [getattr(r, c) for r in records] for c in WEIGHTS_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=WEIGHTS_SCHEMA), folder / "weights.parquet")
    return found


def only(tmp_path: Path, mine: LiveParameter, theirs: LiveParameter) -> Mismatch:
    mismatches = check_weights(trace(tmp_path / "a", mine), trace(tmp_path / "b", theirs))
    assert len(mismatches) == 1
    assert (mismatches[0].kind, mismatches[0].name) == ("weights", mine.name)
    return mismatches[0]


def test_entries_that_are_not_finite_are_counted_in_all_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "BLOCK", 24)
    w = weight()
    w[0, 0], w[9, 2], w[15, 7] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(ModelError, match="3 of 128 entries are NaN or infinite"):
        record_parameter(LiveParameter("embed", w))


def test_equal_weights_have_no_mismatch(tmp_path: Path) -> None:
    w = weight()
    a = trace(tmp_path / "a", LiveParameter("embed", w))
    b = trace(tmp_path / "b", LiveParameter("embed", w.clone(), even_shards(0, [8, 8]), (w, w)))
    assert check_weights(a, b) == []


def test_exchanged_heads_are_named(tmp_path: Path) -> None:
    w = weight()
    swapped = torch.cat([w[HEAD : 2 * HEAD], w[:HEAD], w[2 * HEAD :]])
    name = "layers.0.q_proj"
    mismatch = only(tmp_path, LiveParameter(name, w), LiveParameter(name, swapped))
    assert mismatch.detail == (
        "heads in another order: train's 0 hold the rollout's 1, 1 hold the rollout's 0"
    )
    assert mismatch.ranks == []


@pytest.mark.parametrize(
    ("name", "rows", "columns", "dim", "says"),
    [
        ("layers.1.o_proj", 6, 16, 1, "heads in another order: train's 0-1 hold the rollout's 2-3"),
        ("layers.0.gate_proj", 16, 8, 0, "rows in another order: train's 0-7 hold the rollout's 8"),
    ],
)
def test_exchanged_shards_are_heads_or_rows(
    tmp_path: Path, name: str, rows: int, columns: int, dim: int, says: str
) -> None:
    w = weight(rows, columns)
    swapped = w.roll(8, dim)
    shards = even_shards(dim, [8, 8])
    mismatch = only(tmp_path, LiveParameter(name, w), LiveParameter(name, swapped, shards))
    assert mismatch.detail.startswith(f"train ranks 0, 1: {says}")
    assert mismatch.ranks == [0, 1]


@pytest.mark.parametrize(
    ("side", "rank", "dim", "says"),
    [
        ("train", 0, 0, "rows 0-7"),
        ("train", 1, 0, "rows 8-15"),
        ("rollout", 1, 1, "columns 4-7"),
    ],
)
def test_a_stale_shard_names_its_rank(
    tmp_path: Path, side: str, rank: int, dim: int, says: str
) -> None:
    w, name = weight(), "layers.3.down_proj"
    half = w.shape[dim] // 2
    shards = even_shards(dim, [half, half])
    stale = w.clone()
    stale.narrow(dim, rank * half, half).add_(1)
    sides = {"rollout": LiveParameter(name, w), "train": LiveParameter(name, stale)}
    sides[side] = LiveParameter(name, sides[side].value, shards)
    mismatch = only(tmp_path, sides["rollout"], sides["train"])
    assert mismatch.ranks == [rank]
    assert mismatch.detail == f"{side} rank {rank}: {says} differ"


def test_several_shards_of_a_rank(tmp_path: Path) -> None:
    # Grouped layouts interleave ranks.
    shards = (Shard(0, 0, 0, 4), Shard(1, 0, 4, 8), Shard(0, 0, 8, 12), Shard(1, 0, 12, 16))
    w, stale = weight(), weight()
    stale[5] += 1
    stale[13] += 1
    name = "layers.0.v_proj"
    mismatch = only(tmp_path, LiveParameter(name, w), LiveParameter(name, stale, shards))
    assert mismatch.ranks == [1]
    assert mismatch.detail == "train rank 1: rows 5, 13 differ"


@pytest.mark.parametrize(
    ("copies", "ranks", "says"),
    [
        ((0, 0, 1, 0), [2], "rank 2 has another copy than rank 0"),
        ((1, 0, -1, 0), [0, 2], "ranks 0, 2 have another copy than rank 1"),
    ],
)
def test_a_stale_copy_names_its_rank(
    tmp_path: Path, copies: tuple[int, ...], ranks: list[int], says: str
) -> None:
    """Rank 0 can be the one that is stale."""
    w = weight(16)[:, 0].contiguous()
    first, *others = (w + shift for shift in copies)
    held = LiveParameter("final_norm", first, replicas=tuple(others))
    mismatch = only(tmp_path, LiveParameter("final_norm", w), held)
    assert (mismatch.ranks, mismatch.detail) == (ranks, f"train: {says}")


def test_another_layers_weights_are_recognised(tmp_path: Path) -> None:
    zero, one = weight(seed=0), weight(seed=1)
    names = ("layers.0.up_proj", "layers.1.up_proj")
    a = trace(tmp_path / "a", *map(LiveParameter, names, (zero, one)))
    b = trace(tmp_path / "b", *map(LiveParameter, names, (zero, zero)))
    mismatches = check_weights(a, b)
    assert [m.name for m in mismatches] == ["layers.1.up_proj"]
    assert mismatches[0].detail == "train holds what the rollout holds as layers.0.up_proj"


def test_absent_and_differently_shaped_parameters(tmp_path: Path) -> None:
    a = trace(tmp_path / "a", LiveParameter("embed", weight()), LiveParameter("lm_head", weight()))
    b = trace(tmp_path / "b", LiveParameter("embed", weight(8)))
    found = {m.name: (m.rollout, m.train) for m in check_weights(a, b)}
    assert found["lm_head"] == ("present", "absent")
    assert found["embed"][0].startswith("float32[16, 8]")
    assert found["embed"][1].startswith("float32[8, 8]")


def test_a_vector_is_placed_by_element(tmp_path: Path) -> None:
    w = torch.arange(16.0)
    stale = w.clone()
    stale[3:6] = 0.5
    name = "layers.0.q_proj.bias"
    mismatch = only(tmp_path, LiveParameter(name, w), LiveParameter(name, stale))
    assert mismatch.detail == "rows 3-5 differ"


def rounded(name: str, w: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> LiveParameter:
    return LiveParameter(name, w.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_weights_that_a_side_holds_rounded_are_no_mismatch(
    tmp_path: Path, side: str, dtype: torch.dtype
) -> None:
    w = weight()
    held = {False: LiveParameter("embed", w), True: rounded("embed", w, dtype)}
    a = trace(tmp_path / "a", held[side == "rollout"])
    b = trace(tmp_path / "b", held[side == "train"])
    assert check_weights(a, b) == []
    assert cast_sides(a, b) == {side: str(dtype).removeprefix("torch.")}


def test_one_changed_element_of_rounded_weights_is_named_and_placed(tmp_path: Path) -> None:
    w, embed = weight(), weight(seed=1)
    other = w.clone()
    other[3, 5] += 2.0**-5
    name = "layers.0.down_proj"
    a = trace(tmp_path / "a", rounded(name, other), rounded("embed", embed))
    b = trace(tmp_path / "b", LiveParameter(name, w), LiveParameter("embed", embed))
    (mismatch,) = check_weights(a, b)
    assert (mismatch.name, mismatch.detail) == (name, "rows 3 differ")
    assert cast_sides(a, b) == {"rollout": "bfloat16"}


def test_values_that_are_rounded_and_held_in_float32_are_a_mismatch(tmp_path: Path) -> None:
    """Both sides compute in float32, and by other weights."""
    w = weight()
    a = LiveParameter("embed", w.bfloat16().float())
    assert "differ" in only(tmp_path, a, LiveParameter("embed", w)).detail


def test_a_stale_copy_of_rounded_weights_is_named(tmp_path: Path) -> None:
    w, stale = weight(16, 1)[:, 0], weight(16, 1, seed=1)[:, 0]
    name = "layers.0.attn_norm"
    held = LiveParameter(name, w, (), (stale, w))
    mismatch = only(tmp_path, rounded(name, w), held)
    assert (mismatch.ranks, mismatch.detail) == ([1], "train: rank 1 has another copy than rank 0")
    held = LiveParameter(name, w.bfloat16(), (), (stale.bfloat16(), w.bfloat16()))
    assert only(tmp_path / "narrow", held, LiveParameter(name, w)).ranks == [1]


def test_rounded_weights_in_another_place_are_told(tmp_path: Path) -> None:
    first, second = weight(), weight(seed=1)
    one, two = "layers.0.q_proj", "layers.1.q_proj"
    a = trace(tmp_path / "a", LiveParameter(one, first), LiveParameter(two, second))
    b = trace(tmp_path / "b", rounded(one, first), rounded(two, first))
    (mismatch,) = check_weights(a, b)
    assert mismatch.detail == f"train holds what the rollout holds as {one}"


@pytest.mark.parametrize("added_since", [["casts", "derived", "held"], ["derived", "held"]])
def test_an_older_trace_lacks_columns(tmp_path: Path, added_since: list[str]) -> None:
    """Its weights are read as ever; without casts they differ from rounded ones."""
    w = weight()
    a, b = trace(tmp_path / "a", LiveParameter("embed", w)), LiveParameter("embed", w.bfloat16())
    path = tmp_path / "a" / "weights.parquet"
    pq.write_table(pq.read_table(path).drop_columns(added_since), path)
    embed = a.weights["embed"]
    without_casts = "casts" in added_since
    assert (embed.casts == {}, embed.derived, embed.held) == (without_casts, "", "")
    assert len(check_weights(a, trace(tmp_path / "b", b))) == without_casts
    assert check_weights(a, trace(tmp_path / "c", LiveParameter("embed", w))) == []


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (weight(), "has the other side's values: the copy is stale"),
        (weight(seed=2), "has other values than the copy and the other side"),
        (None, "is empty"),
    ],
)
def test_a_stale_derived_copy_is_named(
    tmp_path: Path, held: torch.Tensor | None, says: str
) -> None:
    copied = weight()
    copied[3] += 1
    copy = LiveParameter("lm_head", copied, derived="model.head", held=held)
    mismatch = only(tmp_path, LiveParameter("lm_head", weight()), copy)
    assert mismatch.derived_copy == {"train": "model.head"}
    assert mismatch.detail == (
        f"derived copy: the train computes with a copy in model.head, whose parameter {says}; "
        "rows 3 differ"
    )
    assert "weights lm_head, derived copy in model.head of the train: " in mismatch_words(mismatch)


def test_a_derived_copy_with_the_values_of_the_other_side_is_no_mismatch(tmp_path: Path) -> None:
    copy = LiveParameter("lm_head", weight(), derived="model.head", held=weight(seed=2))
    a, b = trace(tmp_path / "a", copy), trace(tmp_path / "b", LiveParameter("lm_head", weight()))
    assert check_weights(a, b) == []


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize(
    ("stale", "says"),
    [
        (False, "has other values than the copy and the other side"),
        (True, "has the other side's values: the copy is stale; columns 5 differ"),
    ],
)
def test_both_versions_of_a_weight_that_expands_latents_count(
    tmp_path: Path, side: str, stale: bool, says: str
) -> None:
    """A prefill computes with the parameter, and a step of decode with the copy."""
    right, wrong = weight(), weight()
    wrong[:, 5] *= 1.25
    used, held = (wrong, right) if stale else (right, wrong)
    name, module = "layers.1.latent_attn", "model.layers.1.self_attn.mla_attn.mla_attn"
    both = [
        LiveParameter(name, used, derived=module, held=held),
        LiveParameter(name, right),
    ]
    mismatch = only(tmp_path, *(both if side == "rollout" else reversed(both)))
    assert mismatch.derived_copy == {side: module}
    assert mismatch.detail == (
        f"derived copy: the {side} computes with a copy in {module}, whose parameter {says}"
    )


def test_a_parameter_beside_a_right_copy_counts_for_no_other_weight(tmp_path: Path) -> None:
    used = LiveParameter("lm_head", weight(), derived="lm_head", held=weight(seed=1))
    a, b = trace(tmp_path / "a", used), trace(tmp_path / "b", LiveParameter("lm_head", weight()))
    assert check_weights(a, b) == []
