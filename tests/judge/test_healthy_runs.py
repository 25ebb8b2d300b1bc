"""Which healthy runs are made, and what is made again."""

import argparse
import itertools
from pathlib import Path

import pytest
from healthy_runs import DTYPES, PROCESSORS, Cell, cells, missing, skip

from rlk_align.errors import EngineFailed, ModelError, RlkError

LEVELS = list(PROCESSORS)


def options(**changes: object) -> argparse.Namespace:
    given = {"dtypes": DTYPES, "processors": LEVELS, "all_processors": False, "train": None}
    return argparse.Namespace(**given | {"rollout": ["hf"], "seeds": [0]} | changes)


def test_each_dtype_meets_each_level_of_the_processor() -> None:
    models = [Path(f"m{i}") for i in range(len(LEVELS))]
    made = list(cells(models, options()))
    assert len(made) == len(models) * len(DTYPES)
    assert {(c.dtype, c.processor) for c in made} == {*itertools.product(DTYPES, LEVELS)}
    assert len(list(cells(models, options(all_processors=True)))) == len(made) * len(LEVELS)


@pytest.mark.parametrize(
    ("error", "again"), [(ModelError("heads of 8"), False), (EngineFailed("killed"), True)]
)
def test_what_an_engine_refuses_is_not_tried_again(
    error: RlkError, again: bool, tmp_path: Path
) -> None:
    cell = Cell(model=Path("m"), dtype="bfloat16", processor="avx2", rollout="hf", trains=("fsdp",))
    asked = options(out=tmp_path)
    assert missing(cell, "fsdp", asked)
    skip(cell, "fsdp", error, tmp_path)
    assert missing(cell, "fsdp", asked) == again
    assert error.message in (cell.folder(tmp_path, "fsdp") / "skipped.json").read_text()
