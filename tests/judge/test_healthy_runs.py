"""Which healthy runs are made, and what is made again."""

import argparse
import itertools
from pathlib import Path

import pytest
from healthy_runs import (
    DTYPES,
    HYBRID_PAIRS,
    LENGTHS,
    PROCESSORS,
    SHARED,
    Cell,
    cells,
    missing,
    skip,
)

from rlk_align.data import data_path
from rlk_align.errors import EngineFailed, ModelError, RlkError
from rlk_align.model.prompts import load_prompts

LEVELS = list(PROCESSORS)


def options(out: Path, **changes: object) -> argparse.Namespace:
    given = {"dtypes": DTYPES, "processors": LEVELS, "all_processors": False, "train": None}
    given |= {"out": out, "prompt_count": len(LENGTHS)}
    return argparse.Namespace(**given | {"rollout": ["hf"], "seeds": [0]} | changes)


def test_each_dtype_meets_each_level_of_the_processor(tmp_path: Path) -> None:
    models = [data_path("model")] * len(LEVELS)
    made = list(cells(models, options(tmp_path)))
    assert len(made) == len(models) * len(DTYPES)
    assert {(c.dtype, c.processor) for c in made} == {*itertools.product(DTYPES, LEVELS)}
    every = cells(models, options(tmp_path, all_processors=True))
    assert len(list(every)) == len(made) * len(LEVELS)


def test_a_hybrid_has_pairs_and_prompts_of_its_own(tmp_path: Path) -> None:
    hybrid = Path(__file__).parents[2] / "fixtures/hybrid"
    made = list(cells([hybrid], options(tmp_path, dtypes=["bfloat16"], rollout=["*"])))
    assert {c.rollout: c.trains for c in made} == HYBRID_PAIRS
    prompts = load_prompts(made[0].prompts)
    assert tuple(len(p.ids or ()) for p in prompts) == LENGTHS
    assert len({p.ids[:SHARED] for p in prompts if p.ids and len(p.ids) > SHARED}) == 1
    assert len({p.ids for p in prompts}) == len(prompts)


@pytest.mark.parametrize(
    ("error", "again"), [(ModelError("heads of 8"), False), (EngineFailed("killed"), True)]
)
def test_what_an_engine_refuses_is_not_tried_again(
    error: RlkError, again: bool, tmp_path: Path
) -> None:
    which = {"dtype": "bfloat16", "processor": "avx2", "rollout": "hf"}
    cell = Cell(model=Path("m"), prompts=Path("p"), trains=("fsdp",), **which)
    asked = options(tmp_path)
    assert missing(cell, "fsdp", asked)
    skip(cell, "fsdp", error, tmp_path)
    assert missing(cell, "fsdp", asked) == again
    assert error.message in (cell.folder(tmp_path, "fsdp") / "skipped.json").read_text()
