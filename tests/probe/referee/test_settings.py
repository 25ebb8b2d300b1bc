"""The settings of a live engine, compared with config.json."""

from pathlib import Path
from typing import Any

import pytest
from pair_models import SPARSE

from rlk_align.data import data_path
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.probe.referee.settings import live_settings

MODEL = data_path("model")
LIVE: dict[str, Any] = {
    "norm_eps": 1e-4,
    "final_norm_eps": 1e-4,
    "rope_type": "default",
    "rope_theta": 10000.0,
    "rope_dim": 32,
    "attention_scale": 0.176777,
    "sliding_window": None,
    "activation": "silu",
}


def unlike(attributes: dict[str, Any], folder: Path = MODEL) -> dict[str, list[str]]:
    """Site -> its settings."""
    config, shape = read_config(folder), read_shape(folder)
    found = {s.name: live_settings(s, attributes, config, shape) for s in model_sites(shape)}
    unlike = {name: [str(s) for s in some if s.differs] for name, some in found.items()}
    return {name: some for name, some in unlike.items() if some}


def test_a_text_for_the_values_of_several_ranks_equals_no_number() -> None:
    texts = {"rope_theta": "10000.0 on rank 0; 40000.0 on rank 1"}
    assert set(unlike(LIVE | texts)) == set(unlike(LIVE | {"rope_theta": 4e4}))


def test_a_healthy_engine_has_what_the_config_says() -> None:
    assert unlike(LIVE) == {}
    (site,) = [s for s in model_sites(read_shape(MODEL)) if s.name == "layers.1.attn_norm"]
    (setting,) = live_settings(site, LIVE, read_config(MODEL), read_shape(MODEL))
    assert str(setting) == "norm_eps 0.0001 as in config.json"
    assert unlike({}) == {}, "an engine that says nothing contradicts nothing"


@pytest.mark.parametrize(
    ("attribute", "live", "site", "said"),
    [
        ("norm_eps", 1e-3, "attn_norm", "norm_eps 0.001 live, 0.0001 in config.json"),
        ("rope_theta", 20000.0, "q_rope", "rope_theta 20000.0 live, 10000.0 in config.json"),
        ("rope_dim", 16, "k_rope", "rope_dim 16 live, 32 in config.json"),
        ("attention_scale", 0.2, "attn", "attention_scale 0.2 live, 0.176777 in config.json"),
        ("sliding_window", 64, "attn", "sliding_window 64 live, none in config.json"),
        ("activation", "gelu", "act", "activation gelu live, silu in config.json"),
    ],
)
def test_what_is_otherwise_is_said_of_its_operator_alone(
    attribute: str, live: object, site: str, said: str
) -> None:
    everywhere = unlike(LIVE | {attribute: live})
    assert everywhere[f"layers.2.{site}"] == [said]
    one = unlike(LIVE | {f"layers.2.{attribute}": live})
    assert {name.rpartition(".")[0] for name in one} == {"layers.2"}
    assert one[f"layers.2.{site}"] == [said]
    assert "layers.2.q_proj" not in everywhere


def test_one_norm_of_a_layer_alone() -> None:
    each = {"attn_norm": 1e-4, "mlp_norm": 1e-3, "q_norm": 1e-4, "k_norm": 1e-4}
    found = unlike(LIVE | {"layers.1.norm_eps": each})
    assert found == {"layers.1.mlp_norm": ["norm_eps 0.001 live, 0.0001 in config.json"]}
    assert list(unlike(LIVE | {"final_norm_eps": 1e-3})) == ["final_norm"]


def test_the_routing_of_a_sparse_model() -> None:
    found = unlike({"experts_per_token": 3, "norm_topk_prob": False}, SPARSE)
    assert found["layers.1.experts"] == ["experts_per_token 3 live, 2 in config.json"]
    assert found["layers.1.routing_weights"] == ["norm_topk_prob False live, True in config.json"]
