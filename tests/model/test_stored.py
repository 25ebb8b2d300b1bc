"""Experts that a checkpoint stores as one tensor for each layer, read whole and in part."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stacked_experts import stacked

from rlk_align.errors import ModelError
from rlk_align.model.shape import read_shape
from rlk_align.model.stored import Stacks, stored_tensors
from rlk_align.model.tensors import check_tensors

SPARSE = Path(__file__).parents[2] / "fixtures/sparse"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(stacked(load_file(SPARSE / "model.safetensors")), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((SPARSE / "config.json").read_bytes())
    return tmp_path


def test_each_expert_is_read_from_the_stack(model: Path) -> None:
    shape = read_shape(model)
    check_tensors(model, shape)
    stored, truth = stored_tensors(model, {}), load_file(SPARSE / "model.safetensors")
    assert stored.keys() == truth.keys()
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name, expected in truth.items():
            assert torch.equal(stored[name].read(file), expected), name
            assert stored[name].shape == expected.shape
            assert torch.equal(stored[name].part(file, 0, 3, 9), expected[3:9]), name
            if expected.dim() == 2:
                assert torch.equal(stored[name].part(file, 1, 3, 9), expected[:, 3:9]), name


def test_a_family_may_have_other_names_for_its_stacks(model: Path) -> None:
    path = model / "model.safetensors"
    names = {"mlp.experts.gate_up_proj": "moe.first", "mlp.experts.down_proj": "moe.second"}
    tensors = load_file(path)
    for name in list(tensors):
        for usual, own in names.items():
            if name.endswith(usual):
                tensors[name.replace(usual, own)] = tensors.pop(name)
    save_file(tensors, path)
    truth = load_file(SPARSE / "model.safetensors")
    assert stored_tensors(model, {}).keys() != truth.keys()
    found = stored_tensors(model, {}, stacks=Stacks("moe.first", "moe.second"))
    assert found.keys() == truth.keys()
    with safe_open(path, framework="pt") as file:
        assert all(torch.equal(found[name].read(file), truth[name]) for name in truth)


def test_a_stack_of_another_size_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj"
    save_file(tensors | {name: tensors[name][:7].clone()}, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.2\.mlp\.experts\.7\.down_proj"):
        check_tensors(model, read_shape(model))
    save_file(tensors | {name: tensors[name].mT.contiguous()}, model / "model.safetensors")
    with pytest.raises(ModelError) as error:
        check_tensors(model, read_shape(model))
    part = "model.layers.2.mlp.experts.0.down_proj.weight"
    said = f"has other shapes: {name} (as {part}) [160, 128] instead of [128, 160]"
    assert str(error.value).endswith(said), error.value
