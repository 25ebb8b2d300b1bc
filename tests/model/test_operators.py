"""The catalogue of operators, compared with Megatron's plan of the weights."""

import pytest

from rlk_align.engines.megatron.places import megatron_places
from rlk_align.engines.megatron.weights import parameter_plan
from rlk_align.model.operators import OPERATORS, Size
from rlk_align.model.shape import ModelShape

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
CUT = {
    **dict.fromkeys(("embed", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
    **dict.fromkeys(("attn_norm", "q_norm", "k_norm", "mlp_norm", "final_norm"), None),
}
"""Weight -> the dimension along which Megatron cuts it; None if each rank has the whole weight."""


def test_a_product_has_as_many_features_as_its_weight_has_rows() -> None:
    assert all(o.features == o.weight[0] for o in OPERATORS.values() if o.formula == "linear")


def test_weights_are_cut_as_megatron_cuts_them() -> None:
    biased = frozenset(o.name for _, o in SHAPE.operators() if o.bias)
    places = list(megatron_places(SHAPE, 2, te=False, tied=False))
    plan = parameter_plan(places, SHAPE, 2, biased)
    cut = {op.removeprefix("layers.0."): p.dim for p in plan for op in p.layout.ops}
    # If partial sums are added up, each rank has the whole bias.
    biases = {f"{op}.bias": None if CUT[op] else 0 for op in biased}
    assert cut == CUT | biases
    assert CUT.keys() == {o.parameter or o.name for _, o in SHAPE.operators() if o.weight}


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
