"""Checkpoints that also see images: their decoder's config and tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model, with_vision

from rlk_align.capture.check import check_decoder
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import decoder, read_config, transformers_config
from rlk_align.model.families import FAMILIES
from rlk_align.model.shape import read_shape
from rlk_align.model.stored import stored_tensors
from rlk_align.model.tensors import check_tensors

FORMS = [
    ("qwen3_5_text", "Qwen3_5ForCausalLM", "", "model.language_model."),
    ("gemma3_text", "Gemma3ForCausalLM", "", "language_model.model."),
    ("gemma3_text", "Gemma3ForCausalLM", "model.", "model.language_model."),
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


def test_what_a_published_config_of_gemma_3_leaves_out_is_transformers_default(
    tmp_path: Path,
) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    published = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(published | {"eos_token_id": [1, 106]}))
    shape, config = read_shape(tmp_path), transformers_config(tmp_path)
    defaults = FAMILIES["gemma3_text"].defaults
    assert {key: getattr(config, key) for key in defaults} == defaults
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)
    assert (shape.vocab, shape.context, shape.layers) == (262208, 131072, 34)
    assert (shape.dtype, config.eos_token_id) == ("bfloat16", [1, 106])
