"""The catalogue against what says the same elsewhere: Megatron's plan of the weights."""

import pytest

from rlk_align.engines.megatron.weights import parameter_plan
from rlk_align.model.families import ModelShape
from rlk_align.model.operators import OPERATORS, Size

SHAPE = ModelShape(
    model_type="qwen3",
    layers=1,
    hidden=24,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    vocab=100,
    context=64,
    dtype="bfloat16",
)
CUT = {"none": None, "row": 1, "column": 0, "head": 0, "vocabulary": 0}
"""Axis -> the dimension of a weight along which it is cut."""


def test_names_are_those_of_the_records() -> None:
    assert {name: o.name for name, o in OPERATORS.items()} == {name: name for name in OPERATORS}
    assert all(o.features == o.weight[0] for o in OPERATORS.values() if o.formula == "linear")


def test_weights_are_cut_as_megatron_cuts_them() -> None:
    biased = frozenset(name for name, o in OPERATORS.items() if o.bias)
    plan = parameter_plan(SHAPE, 2, False, biased, "local")
    cut = {op: p.dim for p in plan for op in p.layout.ops}
    records = {o.parameter or name: o for name, o in OPERATORS.items() if o.weight}
    seen = {path.removesuffix(".bias").rpartition(".")[2] for path in cut}
    assert seen == records.keys()
    for path, dim in cut.items():
        record = records[path.removesuffix(".bias").rpartition(".")[2]]
        if path.endswith(".bias"):
            # Where partial sums are added up, each rank holds the bias whole.
            assert dim == (None if record.sharding.join == "sum" else 0), path
        elif record.weight != ("head_dim",):
            assert dim == CUT[record.sharding.axis], path


@pytest.mark.parametrize(
    ("size", "features", "heads"),
    [
        ("one", 1, 1),
        ("hidden", 24, 1),
        ("head_dim", 8, 1),
        ("query_heads", 48, 6),
        ("kv_heads", 16, 2),
        ("intermediate", 40, 1),
        ("vocab", 100, 1),
    ],
)
def test_what_a_dimension_measures(size: Size, features: int, heads: int) -> None:
    assert (SHAPE.size(size), SHAPE.heads_of(size)) == (features, heads)
