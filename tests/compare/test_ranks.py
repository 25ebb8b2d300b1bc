"""Which ranks of a side hold what differs: by features, by rows and by copies."""

from pathlib import Path

import numpy as np
import torch
from synthetic import SHAPE

from rlk_align.compare.divergence import Edge, Side, compare_edges
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.sites import RowIndex, model_sites
from rlk_align.results import SideName, SiteResult
from rlk_align.trace.reader import PassReader
from rlk_align.trace.schema import copy_name
from rlk_align.trace.writer import PassWriter

BATCH = TokenBatch((Sample("a", (1, 2, 3), (4,)), Sample("b", (5, 6), (7, 8))))
INDEX = RowIndex(BATCH)
(EMBED,) = [s for s in model_sites(SHAPE) if s.op == "embed"]
VALUES = torch.arange(len(INDEX) * SHAPE.hidden).reshape(len(INDEX), -1).bfloat16()
HALVES = {"embed": [(0, 0, 4), (1, 4, 8)]}


def written(
    folder: Path, rows: torch.Tensor, copies: torch.Tensor | None = None, held: bool = False
) -> PassReader:
    """A pass of `embed`. `copies`: what rank 1 has; `held`: whether each rank computes a sample."""
    writer = PassWriter(folder, lambda _, sample, position: np.ones(len(sample), dtype=bool))
    writer("embed", rows, INDEX.sample, INDEX.position)
    if copies is not None:
        other = (copies != rows).any(1)
        at = other.numpy()
        writer(copy_name("embed", 1), copies[other], INDEX.sample[at], INDEX.position[at])
    for i, s in enumerate(BATCH.samples if held else ()):
        writer.computes(i, i, range(len(s.ids)))
    writer.finish({})
    return PassReader(folder)


def compared(
    a: PassReader, b: PassReader, sides: tuple[SideName, SideName] = ("rollout", "train"),
    shards: dict[str, list[tuple[int, int, int]]] | None = None,
) -> SiteResult:  # fmt: skip
    first, second = Side("a", sides[0], a, None), Side("b", sides[1], b, None, shards or {})
    edge = Edge("prefill_vs_train", first, second, False, np.ones(len(INDEX), dtype=bool))
    (result,), _ = compare_edges([edge], [EMBED], INDEX, lambda *_: None)
    (site,) = result.sites
    return site


def wrong_at(row: int, feature: int) -> torch.Tensor:
    values = VALUES.clone()
    values[row, feature] += 1024
    return values


def test_features_name_the_rank_that_holds_them(tmp_path: Path) -> None:
    clean, faulty = written(tmp_path / "a", VALUES), written(tmp_path / "b", wrong_at(2, 5))
    assert compared(clean, faulty, shards=HALVES).ranks == {"train": [1]}
    assert compared(clean, faulty).ranks == {}


def test_rows_name_the_rank_that_computed_them(tmp_path: Path) -> None:
    clean, faulty = (
        written(tmp_path / "a", VALUES),
        written(tmp_path / "b", wrong_at(5, 0), held=True),
    )
    assert compared(clean, faulty).ranks == {"train": [1]}


def test_a_copy_that_is_off_differs_and_names_its_rank(tmp_path: Path) -> None:
    clean, faulty = written(tmp_path / "a", VALUES), written(tmp_path / "b", VALUES, wrong_at(2, 5))
    site = compared(clean, faulty)
    assert (site.differ, site.introduced, site.ranks) == (1, 1, {"train": [1]})
    assert site.max_abs >= 1024, "the metrics are of the copy that is off"
    assert site.elements_differ == 1


def test_a_recorded_copy_that_is_off_names_the_first_rank(tmp_path: Path) -> None:
    clean, faulty = written(tmp_path / "a", VALUES), written(tmp_path / "b", wrong_at(2, 5), VALUES)
    assert compared(clean, faulty).ranks == {"train": [0]}


def test_passes_whose_ranks_disagree_alike_are_equal(tmp_path: Path) -> None:
    """Of one engine, in decoding and in scoring."""
    passes = [written(tmp_path / name, VALUES, wrong_at(2, 5)) for name in "ab"]
    site = compared(*passes, sides=("rollout", "rollout"))
    assert (site.differ, site.ranks) == (0, {})
    other = written(tmp_path / "c", VALUES, wrong_at(2, 6))
    assert compared(passes[0], other, sides=("rollout", "rollout")).ranks == {"rollout": [1]}
