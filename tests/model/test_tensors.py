"""A checkpoint's tensors and its config: tensors that are missing, unexpected or misshapen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Cli
from safetensors.torch import load_file, save_file

from rlk_align.data import data_path
from rlk_align.errors import ModelError
from rlk_align.model.quantised import check_not_quantized
from rlk_align.model.shape import read_shape
from rlk_align.model.tensors import check_tensors, expected_tensors

SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 61},
    **{"max_position_embeddings": 64, "dtype": "float32"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True},
}


def check(model: Path) -> None:
    check_tensors(model, read_shape(model))


@pytest.fixture(params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of each family, saved by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SIZES, **FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(model: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_what_transformers_saves_is_whole(saved: Path) -> None:
    check(saved)
    names = load_file(saved / "model.safetensors").keys()
    config = json.loads((saved / "config.json").read_text())
    assert names <= expected_tensors(config, read_shape(saved)).keys()


def test_every_missing_tensor_is_named(saved: Path) -> None:
    whole = load_file(saved / "model.safetensors")
    for name in whole:
        kept = {n: t for n, t in whole.items() if n != name}
        save_file(kept, saved / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"lacks {name}"):
            check(saved)


def test_weights_in_eight_bits_are_refused_by_name(saved: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(saved, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(
        ModelError, match=f"quantised .{name} is stored as F8_E4M3, without scales, one"
    ):
        check(saved)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "fp8 e4m3 with one scale for each tensor",
        ),
        ({"quantization_config": {}}, "quantisation by None"),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "compressed-tensors with 0 groups",
        ),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_its_config(config: dict, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        check_not_quantized(Path("model"), config)
    check_not_quantized(Path("model"), {"quantization_config": None})


def test_what_to_do_about_mxfp4_is_said() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ModelError, match="quantisation by mxfp4") as refused:
        check_not_quantized(Path("model"), config)
    assert "save_original_format=False" in refused.value.fix


def test_unexpected_tensors_and_other_shapes_are_named(saved: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 31)
        tensors["model.layers.0.self_attn.sinks"] = torch.ones(4)
        del tensors["model.norm.weight"]

    change(saved, edit)
    with pytest.raises(ModelError) as error:
        check(saved)
    said = str(error.value)
    assert "lacks model.norm.weight;" in said
    assert "does not ask for, model.layers.0.self_attn.sinks;" in said
    assert "model.layers.1.mlp.up_proj.weight [48, 31] instead of [48, 32]" in said


@pytest.fixture
def embedded(model_copy: Callable[..., Path]) -> Path:
    return model_copy()


def test_a_tied_head_is_the_embedding_or_is_refused(embedded: Path) -> None:
    def head(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            tensors["lm_head.weight"] = value(tensors["model.embed_tokens.weight"].clone())

        return edit

    change(embedded, head(lambda w: w))
    check(embedded)
    change(embedded, head(lambda w: w + 1))
    with pytest.raises(ModelError, match="ties its head to the embedding"):
        check(embedded)


@pytest.mark.parametrize("layers", [3, 5, 10**9, 10**30])
def test_other_layers_than_the_checkpoint_has_are_named(
    model_copy: Callable[..., Path], layers: int
) -> None:
    model = model_copy(config={"num_hidden_layers": layers})
    says = (
        f"config.json states num_hidden_layers={layers}, and the checkpoint has tensors of 4 layer"
    )
    with pytest.raises(ModelError, match=says):
        read_shape(model)


def test_a_damaged_header_leaves_the_layers_to_the_check_of_tensors(embedded: Path) -> None:
    path = embedded / "model.safetensors"
    for header in (b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b""):
        path.write_bytes(header)
        assert read_shape(embedded).layers == 4
        with pytest.raises(ModelError, match="could not load"):
            check(embedded)


def test_frequencies_may_be_stored(embedded: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(embedded, lambda tensors: tensors.update({name: torch.ones(16)}))
    check(embedded)


def test_an_index_stays_in_its_folder(embedded: Path, tmp_path: Path) -> None:
    weights = embedded / "model.safetensors"
    outside = weights.rename(tmp_path / "outside.safetensors")
    index = embedded / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(outside), "a/../../outside.safetensors"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ModelError, match="points outside"):
            check(embedded)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing"):
        check(embedded)
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ModelError, match="not an index of weights"):
            check(embedded)


def test_pickled_weights_are_refused(embedded: Path) -> None:
    torch.save({}, embedded / "pytorch_model.bin")
    (embedded / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        check(embedded)


def test_a_truncated_file_is_one_sentence(embedded: Path) -> None:
    path = embedded / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ModelError, match="could not load") as error:
        check(embedded)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("side", ["--rollout", "--train"])
def test_a_missing_tensor_is_refused_before_any_engine(cli: Cli, embedded: Path, side: str) -> None:
    """transformers fills in ones on both sides, whose weights are then equal."""
    gone = "model.layers.1.input_layernorm.weight"
    change(embedded, lambda tensors: tensors.pop(gone))
    specs = {"--rollout": "hf", "--train": "hf", side: f"hf:model={embedded}"}
    done = cli("compare", *(word for pair in specs.items() for word in pair))
    assert done.code == 2, done.out + done.err
    assert f"lacks {gone}" in done.err
    assert "loading" not in done.err


def test_the_embedded_model_is_whole() -> None:
    check(data_path("model"))
