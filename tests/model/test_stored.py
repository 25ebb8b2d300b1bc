"""Experts that a checkpoint stores as one tensor for each layer, read whole and in part."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stacked_experts import stacked

from rlk_align.errors import ModelError
from rlk_align.model.shape import read_shape
from rlk_align.model.stored import FusedRows, Stacks, stored_tensors
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


def test_a_family_may_have_stacks_of_columns_in_turn_and_biases(tmp_path: Path) -> None:
    experts, inner, hidden, here = 3, 4, 5, "model.layers.0.mlp.experts"
    gate, up = torch.randn(2, experts, inner, hidden)
    down, biases = torch.randn(experts, hidden, inner), torch.randn(2, experts, inner)
    of_down = torch.randn(experts, hidden)
    tensors = {
        f"{here}.gate_up_proj": torch.stack([gate, up], dim=2).flatten(1, 2).mT.contiguous(),
        f"{here}.gate_up_proj_bias": torch.stack([*biases], dim=2).flatten(1),
        f"{here}.down_proj": down.mT.contiguous(),
        f"{here}.down_proj_bias": of_down,
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = stored_tensors(tmp_path, {}, stacks=Stacks(transposed=True, interleaved=True))
    assert len(found) == 6 * experts
    with safe_open(path, framework="pt") as file:
        for e in range(experts):
            for op, weight, bias in (
                ("gate_proj", gate[e], biases[0, e]),
                ("up_proj", up[e], biases[1, e]),
                ("down_proj", down[e], of_down[e]),
            ):
                stored = found[f"{here}.{e}.{op}.weight"]
                assert stored.shape == weight.shape
                assert torch.equal(stored.read(file), weight)
                assert torch.equal(stored.part(file, 0, 1, 3), weight[1:3])
                assert torch.equal(stored.part(file, 1, 1, 3), weight[:, 1:3])
                assert torch.equal(found[f"{here}.{e}.{op}.bias"].read(file), bias)


def test_a_family_may_have_rows_of_several_operators_for_each_head_of_keys(tmp_path: Path) -> None:
    """Two heads of keys of 2 rows, each with two heads of values of 3 rows, of 5 columns."""
    fused = {
        "qkvz": tuple(
            FusedRows(op, first + head * step, first + (head + 1) * step)
            for head in (0, 1)
            for op, first, step in (
                *(("qkv_in", 0, 2), ("qkv_in", 4, 2), ("qkv_in", 8, 6)),
                ("z", 0, 6),
            )
        )
    }
    weight = torch.arange(32 * 5).reshape(32, 5).float()
    path = tmp_path / "model.safetensors"
    save_file({"model.layers.0.qkvz.weight": weight}, path)
    stored = stored_tensors(tmp_path, {}, fused)
    by_head = weight.reshape(2, 16, 5)
    qkv = torch.cat([by_head[:, a:b].reshape(-1, 5) for a, b in ((0, 2), (2, 4), (4, 10))])
    wanted = {"in_proj_qkv": qkv, "in_proj_z": by_head[:, 10:].reshape(-1, 5)}
    assert len(stored) == len(wanted)
    with safe_open(path, framework="pt") as file:
        for name, expected in wanted.items():
            part = stored[f"model.layers.0.linear_attn.{name}.weight"]
            assert part.shape == expected.shape
            assert torch.equal(part.read(file), expected)
            assert torch.equal(part.part(file, 0, 3, 9), expected[3:9])
            assert torch.equal(part.part(file, 1, 1, 3), expected[:, 1:3])


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
