"""The kinds of layers of a config.json that has no `layer_types`, and of layers with one part."""

import json
from pathlib import Path
from typing import Any

import pytest
from family_models import SETTINGS
from random_model import SMALL

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import ModelShape, input_scales, read_shape
from rlk_align.model.sites import model_sites


def shape_of(folder: Path, family: str, **changes: Any) -> ModelShape:
    config = SMALL | {"model_type": family} | SETTINGS[family] | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_shape(folder)


def test_a_published_pattern_gives_the_layers(tmp_path: Path) -> None:
    published = {"layers_block_type": None, "hybrid_override_pattern": "MM*-M-"}
    shape = shape_of(tmp_path, "nemotron_h", **published, num_hidden_layers=52)
    assert shape == shape_of(tmp_path, "nemotron_h")
    assert (shape.delta_layers, shape.mlp_layers, shape.first_attention) == ((0, 1, 4), (3, 5), 2)


def test_a_layer_has_one_part(tmp_path: Path) -> None:
    sites = {s.name: s for s in model_sites(shape_of(tmp_path, "nemotron_h"))}
    assert "layers.3.mlp_norm" in sites
    assert sites["layers.3.mlp_norm"].inputs == ("layers.2.attn_residual",)
    assert not {"layers.3.attn_norm", "layers.2.mlp_norm", "layers.2.q_rope"} & sites.keys()


@pytest.mark.parametrize("pattern", ["MM*E", "M?*-"])
def test_a_layer_of_another_kind_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ModelError, match=r"layers of kind '(moe|\?)' are not supported"):
        shape_of(tmp_path, "nemotron_h", layers_block_type=None, hybrid_override_pattern=pattern)


def test_a_shared_expert_beside_the_experts(tmp_path: Path) -> None:
    """The residual adds both; the tensor of the shared expert is that of a dense model's MLP."""
    shape = shape_of(tmp_path, "granitemoehybrid", num_hidden_layers=4)
    sites = {s.name: s for s in model_sites(shape)}
    branches = ("layers.1.moe_out", "layers.1.shared_down_proj")
    added = sites["layers.1.mlp_residual"]
    assert added.inputs == ("layers.1.attn_residual", *branches)
    assert sites["layers.1.moe_out"].inputs[0] == "layers.1.down_proj"
    assert (shape.sparse_layers, shape.experts, shape.shared_intermediate) == ((0, 1, 2, 3), 8, 256)
    rows = [row.op for row in shape.fused_rows["shared_mlp.input_linear"]]
    assert rows == ["shared_gate_proj", "shared_up_proj"]
    dense = shape_of(tmp_path, "granitemoehybrid", num_hidden_layers=4, num_local_experts=0)
    assert (dense.sparse_layers, dense.experts, dense.intermediate) == ((), 0, 256)
    assert [row.op for row in dense.fused_rows["shared_mlp.input_linear"]] == [
        "gate_proj",
        "up_proj",
    ]
    added = next(s for s in model_sites(dense) if s.name == "layers.1.mlp_residual")
    assert added.inputs == ("layers.1.attn_residual", "layers.1.down_proj")
    for changes in ({"num_local_experts": -1}, {"num_local_experts": 2}):
        with pytest.raises(ModelError, match="num_local_experts"):
            shape_of(tmp_path, "granitemoehybrid", num_hidden_layers=4, **changes)


def test_only_a_family_that_may_be_dense_has_0_experts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_local_experts is 0"):
        shape_of(tmp_path, "granitemoe", num_local_experts=0)


def test_a_state_space_model_beside_attention(tmp_path: Path) -> None:
    """The residual adds both branches, and each input has its number of the config."""
    shape = shape_of(tmp_path, "falcon_h1")
    sites = {s.name: s for s in model_sites(shape)}
    added = sites["layers.1.attn_residual"]
    assert added.inputs == ("layers.0.mlp_residual", "layers.1.o_proj", "layers.1.out_proj")
    config = read_config(tmp_path)
    assert input_scales(config, shape, added.operator) == [(1.0,), (0.9,), (0.3,)]
    conv = input_scales(config, shape, sites["layers.1.conv"].operator)
    assert conv == [(0.9, 1.3, 1.1)]
    assert input_scales(config, shape, sites["layers.1.o_proj"].operator) == []
    assert "layers.1.mamba_gate" in sites
    normed = model_sites(shape_of(tmp_path, "falcon_h1", mamba_rms_norm=True))
    assert "layers.1.mamba_norm" in {s.name for s in normed}
