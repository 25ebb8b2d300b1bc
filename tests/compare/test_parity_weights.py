"""Weights that differ: which slices, whose ranks, and what lies there instead."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from synthetic import draw, write_trace

from rlk_align.compare.parity_weights import check_weights
from rlk_align.engines.common import parameters as live
from rlk_align.engines.common.parameters import LiveParameter, Shard, even_shards, record_parameter
from rlk_align.errors import ModelError
from rlk_align.results import Mismatch
from rlk_align.trace.reader import Trace
from rlk_align.trace.tables import WEIGHTS_SCHEMA

HEAD = 4  # head_dim of the synthetic shape
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
    found = check_weights(trace(tmp_path / "a", mine), trace(tmp_path / "b", theirs))
    assert len(found) == 1
    assert (found[0].kind, found[0].name) == ("weights", mine.name)
    return found[0]


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


def test_the_synthetic_head_is_what_the_tests_think(tmp_path: Path) -> None:
    assert trace(tmp_path / "a").record.shape.head_dim == HEAD


def test_exchanged_heads_are_named(tmp_path: Path) -> None:
    w = weight()
    swapped = torch.cat([w[HEAD : 2 * HEAD], w[:HEAD], w[2 * HEAD :]])
    name = "layers.0.q_proj"
    found = only(tmp_path, LiveParameter(name, w), LiveParameter(name, swapped))
    assert found.detail == (
        "heads in another order: train's 0 hold the rollout's 1, 1 hold the rollout's 0"
    )
    assert found.ranks == []


def test_exchanged_columns_of_o_proj_are_heads(tmp_path: Path) -> None:
    w = weight(6, 16)
    swapped = torch.cat([w[:, 8:], w[:, :8]], dim=1)
    name = "layers.1.o_proj"
    shards = even_shards(1, [8, 8])
    found = only(tmp_path, LiveParameter(name, w), LiveParameter(name, swapped, shards))
    assert "heads in another order: train's 0-1 hold the rollout's 2-3" in found.detail
    assert found.ranks == [0, 1]
    assert found.detail.startswith("train ranks 0, 1: ")


def test_exchanged_shards_of_rows_are_rows(tmp_path: Path) -> None:
    w = weight()
    name = "layers.0.gate_proj"
    swapped = LiveParameter(name, torch.cat([w[8:], w[:8]]), even_shards(0, [8, 8]))
    found = only(tmp_path, LiveParameter(name, w), swapped)
    assert "rows in another order: train's 0-7 hold the rollout's 8-15" in found.detail
    assert found.ranks == [0, 1]


@pytest.mark.parametrize(("rank", "rows"), [(0, "0-7"), (1, "8-15")])
def test_a_stale_shard_names_its_rank(tmp_path: Path, rank: int, rows: str) -> None:
    w, stale = weight(), weight()
    stale[8 * rank : 8 * rank + 8] += 1
    name = "layers.3.k_proj"
    shards = even_shards(0, [8, 8])
    found = only(tmp_path, LiveParameter(name, w), LiveParameter(name, stale, shards))
    assert found.ranks == [rank]
    assert found.detail == f"train rank {rank}: rows {rows} differ"


def test_a_stale_shard_of_columns_names_its_rank(tmp_path: Path) -> None:
    w, stale = weight(), weight()
    stale[:, 4:] += 1
    name = "layers.3.down_proj"
    shards = even_shards(1, [4, 4])
    found = only(tmp_path, LiveParameter(name, w, shards), LiveParameter(name, stale))
    assert found.ranks == [1]
    assert found.detail == "rollout rank 1: columns 4-7 differ"


def test_several_shards_of_a_rank(tmp_path: Path) -> None:
    # Grouped layouts interleave ranks.
    shards = (Shard(0, 0, 0, 4), Shard(1, 0, 4, 8), Shard(0, 0, 8, 12), Shard(1, 0, 12, 16))
    w, stale = weight(), weight()
    stale[5] += 1
    stale[13] += 1
    name = "layers.0.v_proj"
    found = only(tmp_path, LiveParameter(name, w), LiveParameter(name, stale, shards))
    assert found.ranks == [1]
    assert found.detail == "train rank 1: rows 5, 13 differ"


def test_a_stale_copy_names_its_rank(tmp_path: Path) -> None:
    w = weight(16)[:, 0].contiguous()
    copies = LiveParameter("final_norm", w, replicas=(w.clone(), w + 1, w.clone()))
    found = only(tmp_path, LiveParameter("final_norm", w), copies)
    assert found.ranks == [2]
    assert found.detail == "train: rank 2 has another copy than rank 0"


def test_rank_0_can_be_the_one_that_is_stale(tmp_path: Path) -> None:
    w = weight(16)[:, 0].contiguous()
    copies = LiveParameter("final_norm", w + 1, replicas=(w.clone(), w - 1, w.clone()))
    found = only(tmp_path, LiveParameter("final_norm", w), copies)
    assert found.ranks == [0, 2]
    assert found.detail == "train: ranks 0, 2 have another copy than rank 1"


def test_another_layers_weights_are_recognised(tmp_path: Path) -> None:
    zero, one = weight(seed=0), weight(seed=1)
    names = ("layers.0.up_proj", "layers.1.up_proj")
    a = trace(tmp_path / "a", *map(LiveParameter, names, (zero, one)))
    b = trace(tmp_path / "b", *map(LiveParameter, names, (zero, zero)))
    found = check_weights(a, b)
    assert [m.name for m in found] == ["layers.1.up_proj"]
    assert found[0].detail == "train holds what the rollout has as layers.0.up_proj"


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
    found = only(tmp_path, LiveParameter(name, w), LiveParameter(name, stale))
    assert found.detail == "rows 3-5 differ"
