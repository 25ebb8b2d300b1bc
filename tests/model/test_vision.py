"""Checkpoints that also see images: their decoder's config and tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
from family_models import family_model, with_vision

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import decoder_class, read_config
from rlk_align.model.shape import read_shape
from rlk_align.model.stored import stored_tensors
from rlk_align.model.tensors import check_tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A decoder alone, and in a checkpoint that sees images."""
    folder = tmp_path_factory.mktemp("vision")
    alone = family_model(folder, "qwen3_5_text")
    return alone, with_vision(folder / "whole", alone)


def test_config_and_tensors_are_those_of_the_decoder_alone(folders: tuple[Path, Path]) -> None:
    alone, whole = folders
    assert {"architectures": ["Qwen3_5ForCausalLM"], **read_config(whole)} == read_config(alone)
    assert read_shape(whole) == read_shape(alone)
    assert (decoder_class(alone), decoder_class(whole)) == (None, "Qwen3_5ForCausalLM")
    stored, of_alone = (stored_tensors(each, {}) for each in (whole, alone))
    assert stored.keys() - of_alone.keys() == {
        "model.visual.blocks.0.norm1.weight", "mtp.fc.weight",
    }  # fmt: skip
    name = "model.layers.3.self_attn.q_proj.weight"
    assert stored[name].name == "model.language_model.layers.3.self_attn.q_proj.weight"
    check_tensors(whole, read_shape(whole))


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


def test_a_decoder_alone_has_no_part_for_images(tmp_path: Path) -> None:
    alone = family_model(tmp_path, "qwen3_5_text")
    whole = with_vision(tmp_path / "whole", alone)
    (whole / "config.json").write_text((alone / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has, and its config does not ask for, model\.visual"):
        check_tensors(whole, read_shape(whole))


@pytest.mark.parametrize("text", [None, {}, {"model_type": "qwen3_5_moe_text"}])
def test_another_decoder_is_refused(tmp_path: Path, text: Any) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    with pytest.raises(ModelError, match="instead of 'qwen3_5_text'"):
        read_config(tmp_path)
