"""Latent attention (MLA): the sizes and the sites of DeepSeek-V2-Lite, DeepSeek-V3 and
GLM-4.7-Flash, and what is refused of their configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlk_align.errors import ModelError
from rlk_align.model.config_keys import check_settings
from rlk_align.model.families import FAMILIES
from rlk_align.model.shape import ModelShape, read_shape
from rlk_align.model.sites import model_sites
from rlk_align.model.tensors import expected_tensors

CONFIG: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 96},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128},
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12},
    **{"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4},
    **{"topk_group": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"rope_theta": 1e4, "rms_norm_eps": 1e-6, "dtype": "bfloat16"},
}


def shape_of(folder: Path, **changes: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return read_shape(folder)


def test_its_sites_and_tensors(tmp_path: Path) -> None:
    shape = shape_of(tmp_path)
    sites = {s.name: s for s in model_sites(shape)}
    names = [n.rpartition(".")[2] for n in sites if n.startswith("layers.0.")]
    assert names[:11] == [
        *("attn_norm", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "q_rope", "k_rope"),
        *("latent_attn", "o_proj", "attn_residual"),
    ]
    features = {op: sites[f"layers.0.{op}"].features for op in names[1:10]}
    assert features == {
        **{"q_a": 24, "q_a_norm": 24, "q_b": 4 * 20, "kv_a": 40, "kv_a_norm": 32},
        **{"q_rope": 4 * 8, "k_rope": 8, "latent_attn": 4 * 10, "o_proj": 48},
    }
    attention = sites["layers.0.latent_attn"]
    assert attention.inputs == ("layers.0.q_b", "layers.0.q_rope")
    assert attention.prefix_inputs == ("layers.0.kv_a_norm", "layers.0.k_rope")
    tensors = expected_tensors(CONFIG, shape)
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight"] == (4 * (12 + 10), 32)
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (40, 48)
    assert "model.layers.0.self_attn.q_proj.weight" not in tensors


def test_queries_may_have_no_latent(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, q_lora_rank=None)
    sites = {s.name: s for s in model_sites(shape)}
    assert sites["layers.0.q_rope"].inputs == ("layers.0.q_proj",)
    tensors = expected_tensors(CONFIG | {"q_lora_rank": None}, shape)
    assert tensors["model.layers.0.self_attn.q_proj.weight"] == (4 * 20, 48)


V2: dict[str, Any] = {
    **{"model_type": "deepseek_v2", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    **{"n_shared_experts": 2, "topk_method": "greedy", "norm_topk_prob": False},
}


def test_the_routers_of_deepseek_v2_take_a_softmax_in_fp32(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, **V2)
    assert (shape.sparse_layers, shape.norm_topk, shape.shared_intermediate) == ((1, 2), False, 32)
    records = {s.op: s.operator.name for s in model_sites(shape) if s.layer == 1}
    assert records["router"] == "fp32_router"
    assert records["experts"] == "experts"
    assert records["routing_weights"] == "fp32_routing_weights"
    assert records["moe_out"] == "moe_out_with_shared"
    names = expected_tensors(CONFIG | V2, shape)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" not in names


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy'"),
        ({"n_group": 4, "topk_group": 2}, "n_group is 4: experts chosen from the best groups"),
        ({"routed_scaling_factor": 16.0}, "routed_scaling_factor is 16.0: experts' weights"),
    ],
)
def test_what_is_refused_of_deepseek_v2(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        shape_of(tmp_path, **V2 | changes)


def test_weights_of_deepseek_v2_that_only_vllm_would_divide_are_refused(tmp_path: Path) -> None:
    family = FAMILIES["deepseek_v2"]
    assert check_settings(tmp_path, V2, family) == ()
    with pytest.raises(ModelError, match="norm_topk_prob = True"):
        check_settings(tmp_path, V2 | {"norm_topk_prob": True}, family)


def test_sparse_layers_of_glm_are_those_of_its_kinds(tmp_path: Path) -> None:
    glm = {"model_type": "glm4_moe_lite"}
    assert shape_of(tmp_path, **glm).sparse_layers == (1, 2)
    kinds = ["sparse", "dense", "sparse"]
    assert shape_of(tmp_path, **glm, mlp_layer_types=kinds).sparse_layers == (0, 2)
    for wrong in (["sparse"], ["sparse", "dense", "moe"], "sparse"):
        with pytest.raises(ModelError, match="mlp_layer_types is not dense or sparse"):
            shape_of(tmp_path, **glm, mlp_layer_types=wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_interleave": False}, "rope_interleave is False: rotations of j and j"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0"),
        ({"v_head_dim": 1.5}, "v_head_dim is 1.5"),
        ({"model_type": "deepseek_v32"}, r"latent attention \(MLA\)"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        shape_of(tmp_path, **changes)
