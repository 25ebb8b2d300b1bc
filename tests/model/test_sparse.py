"""Families with sparse layers: their configs, sites and tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlk_align.data import data_path
from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.rotary import checkpoint_rotary, partial_rotary_factor
from rlk_align.model.shape import ModelShape, read_shape
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.model.tensors import check_tensors, expected_tensors

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 48},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100},
    **{"num_hidden_layers": 2, "max_position_embeddings": 64, "dtype": "bfloat16"},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
}


GLM = {
    **{"model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 80, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100, "dtype": "bfloat16"},
    **{"num_hidden_layers": 3, "max_position_embeddings": 64, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "attention_bias": True},
}


def shape_of(folder: Path, config: dict[str, Any], **changes: Any) -> ModelShape:
    changed = {k: v for k, v in (config | changes).items() if v is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(changed))
    return read_shape(folder)


def qwen(folder: Path, **changes: Any) -> ModelShape:
    config = json.loads((SPARSE / "config.json").read_text())
    return shape_of(folder, config, **changes)


def test_the_embedded_sparse_model_has_a_dense_layer_and_three_sparse_ones() -> None:
    shape = read_shape(SPARSE)
    assert (shape.sparse_layers, shape.experts, shape.top_k) == ((1, 2, 3), 8, 2)
    assert (shape.expert_intermediate, shape.norm_topk) == (160, True)
    check_tensors(SPARSE, shape)
    size = sum(f.stat().st_size for f in SPARSE.iterdir())
    assert size < 4_000_000


def test_a_dense_model_has_no_experts() -> None:
    shape = read_shape(data_path("model"))
    assert (shape.sparse_layers, shape.experts, shape.top_k) == ((), 0, 0)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"mlp_only_layers": []}, (0, 1, 2, 3)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (1,)),
        ({"num_local_experts": None, "num_experts": 8}, (1, 2, 3)),
    ],
)
def test_which_layers_are_sparse(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    shape = qwen(tmp_path, **changes)
    assert (shape.sparse_layers, shape.experts) == (layers, 8)


def test_qwen_divides_the_weights_where_its_config_says_so_and_mixtral_always(
    tmp_path: Path,
) -> None:
    assert not qwen(tmp_path, norm_topk_prob=None).norm_topk
    shape = shape_of(tmp_path, MIXTRAL)
    assert (shape.norm_topk, shape.expert_intermediate, shape.sparse_layers) == (True, 48, (0, 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and num_local_experts is 8"),
        ({"num_local_experts": None}, "num_local_experts is None"),
        ({"num_local_experts": 8.0}, "num_local_experts is 8.0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is not a list of layers"),
        (
            {"shared_expert_intermediate_size": 64},
            "shared_expert_intermediate_size is 64: experts that every token is sent to are not",
        ),
        ({"n_shared_experts": 1}, "experts that every token is sent to are not supported"),
        ({"n_group": 8}, "n_group is 8: experts chosen from the best groups of experts are not"),
        ({"topk_group": 4}, "topk_group is 4: experts chosen from the best groups"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': routers that score by anything"),
        (
            {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc': experts chosen by anything other than",
        ),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5: experts' weights that are"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        qwen(tmp_path, **changes)


def test_settings_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    plain = {"n_group": 1, "topk_group": 1, "scoring_func": "softmax", "topk_method": "greedy"}
    assert qwen(tmp_path, **plain, routed_scaling_factor=1.0, n_shared_experts=0).experts == 8


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("deepseek_v32", r"latent attention \(MLA\) over keys that an indexer chooses"),
    ],
)
def test_families_with_other_routing_are_refused_by_name(
    tmp_path: Path, kind: str, said: str
) -> None:
    with pytest.raises(ModelError, match=f"model_type '{kind}' is not supported: .*{said}"):
        qwen(tmp_path, model_type=kind)


def test_the_keys_of_ernie_and_minimax(tmp_path: Path) -> None:
    config = json.loads((SPARSE / "config.json").read_text())
    for key in ("num_experts", "num_local_experts", "num_experts_per_tok", "mlp_only_layers"):
        config.pop(key, None)
    ernie: dict[str, Any] = config | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
    }
    ernie |= {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_num_shared_experts": 3}
    shape = shape_of(tmp_path, ernie)
    assert (shape.experts, shape.top_k, shape.sparse_layers) == (8, 2, (1, 2))
    assert shape.shared_intermediate == 3 * shape.expert_intermediate
    assert shape_of(tmp_path, ernie | {"moe_layer_end_index": -1}).sparse_layers == (1, 2, 3)
    with pytest.raises(ModelError, match="moe_layer_end_index is 4"):
        shape_of(tmp_path, ernie | {"moe_layer_end_index": 4})
    assert partial_rotary_factor({"rotary_dim": 16, "head_dim": 64}) == 0.25


def test_sites_of_a_sparse_layer() -> None:
    shape = read_shape(SPARSE)
    sites = {s.name: s for s in model_sites(shape)}
    names = [n.rpartition(".")[2] for n in sites if n.startswith("layers.1.")]
    assert names[names.index("mlp_norm") + 1 :] == [
        *("router", "experts", "routing_weights", "gate_proj", "up_proj", "act", "down_proj"),
        *("moe_out", "mlp_residual"),
    ]
    assert "layers.0.router" not in sites
    router, down, out = (sites[f"layers.1.{op}"] for op in ("router", "down_proj", "moe_out"))
    assert (router.inputs, router.features) == (("layers.1.mlp_norm",), 8)
    assert (down.inputs, down.experts) == (("layers.1.act",), "layers.1.experts")
    assert (down.features, sites["layers.1.act"].features) == (2 * 128, 2 * 160)
    wanted = ("down_proj", "routing_weights", "experts")
    assert out.inputs == tuple(f"layers.1.{op}" for op in wanted)
    assert sites["layers.1.mlp_residual"].inputs == ("layers.1.attn_residual", "layers.1.moe_out")
    assert sites["layers.0.mlp_residual"].inputs[1] == "layers.0.down_proj"


def test_each_expert_has_parameters_of_its_own(tmp_path: Path) -> None:
    shape = read_shape(SPARSE)
    up = next(s for s in model_sites(shape) if s.name == "layers.2.up_proj")
    parameters = site_parameters(up, shape)
    assert parameters == tuple(f"layers.2.experts.{e}.up_proj" for e in range(8))
    assert tensor_name(parameters[7]) == "model.layers.2.mlp.experts.7.up_proj.weight"
    mixtral = shape_of(tmp_path, MIXTRAL)
    tensors = expected_tensors(MIXTRAL, mixtral)
    block = "model.layers.1.block_sparse_moe"
    assert tensors[f"{block}.gate.weight"] == (4, 64)
    assert tensors[f"{block}.experts.3.w1.weight"] == tensors[f"{block}.experts.3.w3.weight"]
    assert tensors[f"{block}.experts.3.w2.weight"] == (64, 48)


def test_a_family_whose_scores_are_corrected(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, GLM)
    assert (shape.sparse_layers, shape.experts, shape.top_k) == ((1, 2), 8, 2)
    assert (shape.groups, shape.top_groups, shape.weight_scale) == (4, 2, 2.5)
    assert (shape.shared_intermediate, shape.norm_topk, shape.qk_norm) == (96, True, False)
    assert shape_of(tmp_path, GLM, first_k_dense_replace=0).sparse_layers == (0, 1, 2)
    assert shape_of(tmp_path, GLM, use_qk_norm=True).has("q_norm")
    assert shape_of(tmp_path, GLM, scoring_func="sigmoid", topk_method="noaux_tc").groups == 4
    rotary = checkpoint_rotary(tmp_path, shape)
    assert rotary is not None
    assert len(rotary.inv_freq) == 8


def test_its_sites_and_tensors(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, GLM)
    sites = {s.name: s for s in model_sites(shape)}
    names = [n.rpartition(".")[2] for n in sites if n.startswith("layers.1.")]
    assert names[names.index("mlp_norm") + 1 :] == [
        *("router", "experts", "routing_weights", "gate_proj", "up_proj", "act", "down_proj"),
        *("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj"),
        *("moe_out", "mlp_residual"),
    ]
    out = sites["layers.1.moe_out"]
    wanted = ("down_proj", "routing_weights", "experts", "shared_down_proj")
    assert out.inputs == tuple(f"layers.1.{op}" for op in wanted)
    act = sites["layers.1.shared_act"]
    assert act.inputs == ("layers.1.shared_gate_proj", "layers.1.shared_up_proj")
    assert (act.features, sites["layers.1.down_proj"].features) == (96, 2 * 64)
    assert sites["layers.1.router"].operator.rounded_to == "float32"
    tensors = expected_tensors(GLM, shape)
    assert tensors["model.layers.2.mlp.gate.e_score_correction_bias"] == (8,)
    assert tensors["model.layers.2.mlp.shared_experts.down_proj.weight"] == (64, 96)
    assert "model.layers.0.mlp.gate_proj.weight" in tensors
    assert "model.layers.0.self_attn.q_proj.bias" in tensors
    assert "model.layers.0.self_attn.o_proj.bias" not in tensors
    assert tensor_name("layers.2.experts") == "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_group": 3}, "cannot be chosen from topk_group=2 of n_group=3 groups of 8 experts"),
        ({"n_group": 8}, "cannot be chosen from topk_group=2 of n_group=8"),
        ({"topk_group": 5}, "cannot be chosen from topk_group=5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 cannot be chosen"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor is -1.0"),
        (
            {"n_routed_experts": 64, "n_group": 32, "topk_group": 16},
            "n_group=32 and topk_group=16 allow 601,080,390 selections",
        ),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"scoring_func": "softplus"}, "scoring_func is 'softplus'"),
        ({"num_shared_experts": 1}, "num_shared_experts is 1"),
    ],
)
def test_what_is_refused_of_it(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        shape_of(tmp_path, GLM, **changes)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, GLM)
    tensors = {n: torch.zeros(s) for n, s in expected_tensors(GLM, shape).items()}
    more = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    check_tensors(tmp_path, shape_of(tmp_path, GLM, num_nextn_predict_layers=1))
    with pytest.raises(ModelError, match="has tensors of 4 layers"):
        shape_of(tmp_path, GLM)
