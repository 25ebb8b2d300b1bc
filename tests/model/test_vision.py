"""Checkpoints that also see images: their decoder's config and tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model, with_vision

from rlk_align.capture.check import check_decoder
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.limits import check_vllm
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import decoder, read_config, transformers_config
from rlk_align.model.config_keys import check_settings
from rlk_align.model.families import FAMILIES
from rlk_align.model.shape import is_tied, read_shape
from rlk_align.model.stored import stored_tensors
from rlk_align.model.tensors import check_tensors

FORMS = [
    ("qwen3_5_text", "Qwen3_5ForCausalLM", "", "model.language_model."),
    ("gemma3_text", "Gemma3ForCausalLM", "", "language_model.model."),
    ("gemma3_text", "Gemma3ForCausalLM", "model.", "model.language_model."),
    ("gemma4_text", "Gemma4ForCausalLM", "", "model.language_model."),
    ("mistral", "MistralForCausalLM", "", "language_model.model."),
    ("ministral3", "Ministral3ForCausalLM", "", "language_model.model."),
    ("ministral3", "Ministral3ForCausalLM", "model.", "model.language_model."),
]
"""The decoder's family and class, the form (see `with_vision`), and what its tensors' names start
with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def alone_and_whole(folder: Path, family: str, start: str = "") -> tuple[Path, Path]:
    """A decoder alone, and in a checkpoint that sees images."""
    alone, whole = family_model(folder, family), folder / f"{family}-whole-{start}"
    return alone, whole if whole.exists() else with_vision(whole, alone, start)


@pytest.mark.parametrize(("family", "cls", "start", "inside"), FORMS)
def test_config_and_tensors_are_those_of_the_decoder_alone(
    folder: Path, family: str, cls: str, start: str, inside: str
) -> None:
    alone, whole = alone_and_whole(folder, family, start)
    config = read_config(whole)
    left_out = {"rms_norm_eps": 1e-6} if family == "gemma3_text" else {}
    assert {"architectures": [cls], **left_out, **config} == read_config(alone)
    assert read_shape(whole) == read_shape(alone)
    found = decoder(whole)
    assert found is not None
    assert (decoder(alone), found.cls) == (None, cls)
    stored, of_alone = (stored_tensors(each, {}) for each in (whole, alone))
    beside = {n for n in stored.keys() - of_alone.keys() if not n.startswith("mtp.")}
    assert of_alone.keys() <= stored.keys()
    assert beside
    assert all(name.startswith(found.images) for name in beside)
    name = "model.layers.3.self_attn.q_proj.weight"
    assert stored[name].name == f"{inside}layers.3.self_attn.q_proj.weight"
    check_tensors(whole, read_shape(whole))


@pytest.mark.parametrize(("family", "cls", "start"), [form[:3] for form in FORMS])
def test_transformers_loads_the_config_and_the_weights_of_the_decoder_alone(
    folder: Path, family: str, cls: str, start: str
) -> None:
    from rlk_align.engines.hf.engine import HFEngine

    loaded = []
    for path in alone_and_whole(folder, family, start):
        engine = HFEngine(EngineSpec.parse("hf"), path, read_shape(path))
        loaded.append(engine.load("bfloat16"))
    alone, whole = loaded
    assert type(alone).__name__ == type(whole).__name__ == cls
    settings = [m.config.to_dict() | {"_name_or_path": "", "architectures": []} for m in loaded]
    assert settings[0] == settings[1]
    assert settings[0]["num_hidden_layers"] == 4
    weights, of_alone = whole.state_dict(), alone.state_dict()
    assert weights.keys() == of_alone.keys()
    assert all(torch.equal(weights[name], of_alone[name]) for name in of_alone)


def test_a_missing_tensor_of_the_decoder_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = with_vision(tmp_path / "whole", family_model(tmp_path, "qwen3_5_text"))
    lost = "model.language_model.layers.3.self_attn.q_proj.weight"
    index = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    path = whole / index[lost]
    kept = {name: value for name, value in load_file(path).items() if name != lost}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.3\.self_attn\.q_proj\.weight"):
        check_tensors(whole, read_shape(whole))


@pytest.mark.parametrize(
    ("family", "image"),
    [("qwen3_5_text", r"model\.visual"), ("gemma3_text", r"multi_modal_projector")],
)
def test_a_decoder_alone_has_no_part_for_images(tmp_path: Path, family: str, image: str) -> None:
    alone, whole = alone_and_whole(tmp_path, family)
    (whole / "config.json").write_text((alone / "config.json").read_text())
    with pytest.raises(ModelError, match=f"has, and its config does not ask for, {image}"):
        check_tensors(whole, read_shape(whole))


@pytest.mark.parametrize(
    ("kind", "text", "known"),
    [
        *(("qwen3_5", t, "'qwen3_5_text'") for t in (None, {}, {"model_type": "qwen3_5_moe_text"})),
        ("gemma3", {"model_type": "gemma2"}, "'gemma3_text'"),
        # A family, and no family; neither was compared in such a checkpoint.
        *(("mistral3", {"model_type": t}, "'mistral' or 'ministral3'") for t in ("llama", "mamba")),
    ],
)
def test_another_decoder_is_refused(tmp_path: Path, kind: str, text: Any, known: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    stated = text.get("model_type") if text else None
    said = f"has model_type '{kind}', and its text_config has model_type {stated!r} instead of"
    with pytest.raises(ModelError, match=f"{said} {known}"):
        read_config(tmp_path)


def test_engines_that_cannot_leave_out_the_part_for_images_are_refused(folder: Path) -> None:
    alone, whole = alone_and_whole(folder, "mistral")
    for spec in ("hf", "fsdp:dp=2", "megatron:tp=2", "deepspeed", "vllm"):
        check_decoder(EngineSpec.parse(spec), whole)
    with pytest.raises(ModelError, match="'sglang' does not load the decoder, MistralForCausalLM"):
        check_decoder(EngineSpec.parse("sglang"), whole)
    with pytest.raises(BadOption, match="tp=2 does not support a checkpoint that also sees images"):
        check_decoder(EngineSpec.parse("vllm:tp=2"), whole)
    for spec in ("sglang", "vllm:tp=2"):
        check_decoder(EngineSpec.parse(spec), alone)


MISTRAL_SMALL = {
    **{"attention_dropout": 0.0, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64},
    **{"initializer_range": 0.02, "intermediate_size": 128, "max_position_embeddings": 131072},
    **{"model_type": "mistral", "num_attention_heads": 4, "num_hidden_layers": 2},
    **{"num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 1e9, "use_cache": True},
    **{"sliding_window": None, "vocab_size": 256},
}
MINISTRAL = {
    **{key: value for key, value in MISTRAL_SMALL.items() if key != "rope_theta"},
    **{"model_type": "ministral3", "max_position_embeddings": 262144},
    "rope_parameters": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384},
        **{"rope_theta": 1e6, "rope_type": "yarn", "type": "yarn"},
    },
}


@pytest.mark.parametrize("text", [MISTRAL_SMALL, MINISTRAL], ids=lambda text: text["model_type"])
def test_published_configs_of_mistral_3_are_accepted(tmp_path: Path, text: dict[str, Any]) -> None:
    published = {
        **{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
        **{"image_token_index": 10, "multimodal_projector_bias": False, "vision_feature_layer": -1},
        **{"projector_hidden_act": "gelu", "spatial_merge_size": 2, "torch_dtype": "bfloat16"},
        **{"text_config": text, "vision_config": {"model_type": "pixtral"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    shape, config = read_shape(tmp_path), read_config(tmp_path)
    check_settings(tmp_path, config, shape.family)
    check_vllm(EngineSpec.parse("vllm").option, config, shape)
    assert (shape.model_type, shape.dtype) == (text["model_type"], "bfloat16")


@pytest.mark.parametrize("in_text", [None, True, False])
@pytest.mark.parametrize("beside", [None, True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_a_head_is_tied_as_transformers_ties_that_of_the_whole(
    tmp_path: Path, stored: bool, beside: bool | None, in_text: bool | None
) -> None:
    from transformers import Mistral3ForConditionalGeneration

    alone = family_model(tmp_path, "mistral", num_hidden_layers=1, tie_word_embeddings=not stored)
    whole = with_vision(tmp_path / "whole", alone)
    config = json.loads((whole / "config.json").read_text())
    for part, tied in ((config, beside), (config["text_config"], in_text)):
        part["tie_word_embeddings"] = tied
        if tied is None:
            del part["tie_word_embeddings"]
    (whole / "config.json").write_text(json.dumps(config))
    live = Mistral3ForConditionalGeneration.from_pretrained(whole)
    tied = live.lm_head.weight is live.model.language_model.embed_tokens.weight
    assert is_tied(read_config(whole)) is tied
    assert transformers_config(whole).tie_word_embeddings is tied
    if beside is False and not stored:
        with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
            check_tensors(whole, read_shape(whole))
    else:
        check_tensors(whole, read_shape(whole))


def test_what_a_published_config_of_gemma_3_leaves_out_is_transformers_default(
    tmp_path: Path,
) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    published = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(published | {"eos_token_id": [1, 106]}))
    shape, config = read_shape(tmp_path), transformers_config(tmp_path)
    check_settings(tmp_path, read_config(tmp_path), shape.family)
    check_vllm(EngineSpec.parse("vllm").option, read_config(tmp_path), shape)
    defaults = FAMILIES["gemma3_text"].defaults
    assert {key: getattr(config, key) for key in defaults} == defaults
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)
    assert (shape.vocab, shape.context, shape.layers) == (262208, 131072, 34)
    assert (shape.dtype, config.eos_token_id) == ("bfloat16", [1, 106])
