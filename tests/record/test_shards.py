"""What becomes of the shards of several ranks, without any rank."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlk_align.compare.divergence import Side
from rlk_align.errors import BadOption, CorruptTrace
from rlk_align.record.merge.history import Digests, old_values
from rlk_align.record.train.libraries import live_model
from rlk_align.record.train.rank_attributes import merged
from rlk_align.trace.reader import PassReader
from rlk_align.trace.renumber import renumber_passes
from rlk_align.trace.writer import PassWriter


def write_shard(folder: Path, rank: int, site: str, samples: list[int], width: int = 3) -> None:
    """A shard whose row of a sample at position P has the value 100 rank + 10 sample + P."""
    writer = PassWriter(folder, lambda _site, sample, _position: np.ones(len(sample), dtype=bool))
    for sample in samples:
        position = np.arange(4)
        rows = torch.from_numpy(100 * rank + 10 * sample + position).float()[:, None]
        writer(site, rows.expand(-1, width), np.full(4, sample), position)
        writer.computes(rank, sample, range(4))
    writer.finish({f"hidden{rank}": "a reason"})


def test_shards_become_one_pass_with_the_numbers_of_the_batch(tmp_path: Path) -> None:
    write_shard(tmp_path / "0", 0, "embed", [0, 1])
    write_shard(tmp_path / "1", 1, "embed", [0, 1])
    write_shard(tmp_path / "2", 2, "final_norm", [0])
    sources = [(tmp_path / "0", {1: 2}), (tmp_path / "1", {0: 0, 1: 1}), (tmp_path / "2", {0: 2})]
    renumber_passes(sources, tmp_path / "merged")
    reader = PassReader(tmp_path / "merged")
    assert {name: r.rows for name, r in reader.record.sites.items()} == {
        "embed": 12,
        "final_norm": 4,
    }
    expected = {2: 10, 0: 100, 1: 110}
    rows = reader.rows("embed")
    assert rows is not None
    values = reader.values("embed", rows, np.arange(12))[:, 0].tolist()
    for sample, position, value in zip(rows.sample, rows.position, values, strict=True):
        assert value == expected[sample] + position
    assert sorted((h.sample, h.rank) for h in reader.record.held) == [
        (0, 1),
        (1, 1),
        (2, 0),
        (2, 2),
    ]
    assert set(reader.record.unexposed) == {"hidden0", "hidden1", "hidden2"}
    # A changed file of any shard is noticed.
    (tmp_path / "2/values-00000.safetensors").write_bytes(b"")
    with pytest.raises(CorruptTrace, match="2/values-00000"):
        renumber_passes(sources, tmp_path / "again")


def test_shards_that_disagree_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "0", 0, "embed", [0])
    write_shard(tmp_path / "1", 1, "embed", [0], width=4)
    sources = [(tmp_path / "0", {0: 0}), (tmp_path / "1", {0: 1})]
    with pytest.raises(CorruptTrace, match=r"disagree on embed: float32\[3\] and float32\[4\]"):
        renumber_passes(sources, tmp_path / "merged")


def test_a_lost_rank_is_named_where_it_would_have_rows() -> None:
    stages = {"layers.0.attn": [0, 1], "layers.2.attn": [2, 3]}
    side = Side("train prefill", "train", None, None, stages=stages, lost=[3])  # type: ignore[arg-type]
    assert side.name_at("layers.0.attn") == "train prefill"
    assert side.name_at("layers.2.attn") == "train prefill, without the shard of rank 3,"
    several = Side("train prefill", "train", None, None, lost=[1, 2])  # type: ignore[arg-type]
    assert several.name_at("embed") == "train prefill, without the shard of ranks 1, 2,"


def test_ranks_with_other_attributes_are_named() -> None:
    ranks = [{"rope_theta": 1e4, "layers": 4}, {"rope_theta": 4e4, "layers": 4}, {"layers": 4}]
    assert merged(ranks[:1] * 2) == ranks[0]
    assert merged(ranks) == {
        "layers": 4,
        "rope_theta": "10000.0 on rank 0; 40000.0 on rank 1; None on rank 2",
    }


def test_the_side_with_an_old_value_is_named() -> None:
    def weights(**rows: list[int]) -> dict[str, Digests]:
        return {n: Digests(str(r), np.array(r)) for n, r in rows.items()}

    earlier = [(0, weights(up=[1, 2, 3, 4], down=[5, 6]))]
    now = weights(up=[1, 2, 3, 4], down=[7, 8])
    trained = weights(up=[11, 12, 13, 14], down=[7, 8])
    half = weights(up=[11, 12, 3, 4], down=[7, 8])
    assert "the rollout is stale" in old_values(now, trained, earlier)["up"]
    assert "the trainer is stale" in old_values(trained, half, earlier)["up"]
    # Both have values that the earlier step lacks.
    assert old_values(trained, weights(up=[21, 22, 23, 24], down=[7, 8]), earlier) == {}
    assert old_values(now, now, earlier) == {}
    # Nothing was trained, so an old value says nothing.
    assert old_values(trained, weights(up=[1, 2, 3, 4], down=[5, 6]), earlier) == {}


def test_an_engine_that_is_not_the_models_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    for engine, said in (("sglang", "'sglang' is not recorded"), ("fsdp", "one of 'hf'")):
        with pytest.raises(BadOption, match=said):
            live_model(model, engine, None, temperature=1.0, weights=False)

    model.weight.ds_id = 0  # as ZeRO marks what it shards
    with pytest.raises(BadOption, match="without its engine, is not recorded"):
        live_model(model, "auto", None, temperature=1.0, weights=False)
